"""Phases: the groups of waves of a step. A phase begins when the phase before has ended."""

from __future__ import annotations

from runtime.plan.plan import Plan


def phases(plan: Plan) -> list[tuple[int, ...]]:
    """Puts the waves of a step into phases.

    As a rule a phase is one wave. A stage that may wait may wait for a stage of a later wave that does not depend on
    it. So these two waves are in one phase. In such a phase each stage begins as soon as those it depends on are over.

    Returns:
        The waves of each phase, in order.
    """
    waves = [call.wave for call in plan.stages]
    waiting = {i for i, call in enumerate(plan.stages) if call.stage.may_wait}
    behind: list[set[int]] = []  # for each stage, those that may wait on which it depends
    last = {wave: wave for wave in waves}  # up to where a wave must not be waited for
    for i, before in enumerate(plan.after):
        behind.append({w for b in before for w in behind[b]} | waiting.intersection(before))
        for other in waiting:
            if waves[other] < waves[i] and other not in behind[i]:
                last[waves[other]] = max(last[waves[other]], waves[i])
    found: list[list[int]] = []
    end = -1
    for wave in sorted(last):
        if wave > end:
            found.append([])
        found[-1].append(wave)
        end = max(end, last[wave])
    return [tuple(phase) for phase in found]
