"""Phases: the groups of waves of a step. A phase begins when the phase before has ended."""

from runtime.plan.plan import Plan


def group_waves(plan: Plan) -> list[tuple[int, ...]]:
    """Groups the waves of a step into phases.

    As a rule a phase is one wave. A stage that may wait may wait for a stage of a later wave, if
    the later stage does not depend on the waiting stage. So the waves from the one stage to the
    other are one phase. In such a phase a stage begins as soon as the stages before are finished.

    Returns:
        The waves of each phase, in order.
    """
    last = _find_last_waves(plan)
    phases: list[list[int]] = []
    end = -1
    for wave in sorted(last):
        if wave > end:
            phases.append([])
        phases[-1].append(wave)
        end = max(end, last[wave])
    assert [wave for phase in phases for wave in phase] == sorted(last), "a wave is in no phase"
    return [tuple(phase) for phase in phases]


def _find_last_waves(plan: Plan) -> dict[int, int]:
    """Finds for each wave the last wave of its phase, as far as the wave itself decides."""
    waves = [call.wave for call in plan.stages]
    waiting = {i for i, call in enumerate(plan.stages) if call.stage.may_wait}
    last = {wave: wave for wave in waves}
    # For each stage, the stages before that may wait.
    behind: list[set[int]] = []
    for i, before in enumerate(plan.after):
        behind.append({w for b in before for w in behind[b]} | waiting.intersection(before))
        for other in waiting:
            if waves[other] < waves[i] and other not in behind[i]:
                last[waves[other]] = max(last[waves[other]], waves[i])
    return last
