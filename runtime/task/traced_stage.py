"""Traced stages: stages and fetches of a task that are timed, for a plan that was registered to be traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from runtime import concurrency
from runtime.observe.trace import Span, Tracer, nbytes
from runtime.plan.plan import StageCall
from runtime.state.cancellation import Cancellation
from runtime.task.executor import PreparedStage
from runtime.tensor_spec import AnyArray
from runtime.wire.connection import current_lane

_SHOWN = 5
"""Most operations that a label names."""

FetchFrom = Callable[[str, int, int, int], AnyArray]
"""``(task, session, step, slot) -> array``: fetches what another task holds."""


@dataclass(frozen=True)
class TracedStage:
    """A prepared stage that is timed. A run returns when the results are computed.

    Args:
        prepared: The stage.
        call: Place of the stage in the plan.
        tracer: Tracer that keeps the spans.
    """

    prepared: PreparedStage
    call: StageCall
    tracer: Tracer

    def place(self, value: AnyArray) -> AnyArray:
        """Returns a value on the device of the stage; see ``PreparedStage.place``."""
        return self.prepared.place(value)

    def wait(self, done: jax.Array | None) -> None:
        """Waits until a run is done; see ``PreparedStage.wait``."""
        self.prepared.wait(done)

    def run(
        self, inputs: Sequence[AnyArray], client: int = 0, cancelled: Cancellation | None = None
    ) -> tuple[list[AnyArray], jax.Array | None]:
        """Runs the stage; see ``PreparedStage.run``."""
        start = concurrency.wall_time_ns()
        outputs, done = self.prepared.run(inputs, client, cancelled)
        # XLA computes in the background, and the span shall have the whole time.
        self.prepared.wait(done)
        for output in outputs:
            if not isinstance(output, np.ndarray):
                output.block_until_ready()
        end = concurrency.wall_time_ns()
        call, device = self.call, self.call.stage.device.name
        names = call.stage.operations
        label = ", ".join(names[:_SHOWN]) + (
            f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        )
        wave = call.wave
        spans = [Span(device, f"stage:{wave}", wave, start, end, nbytes(outputs), label, names)]
        # Without a lane the inputs come from this process, and nothing is received or sent.
        if current_lane():
            came = nbytes(value for i, value in enumerate(inputs) if i not in call.remote)
            went = nbytes(outputs[i] for i in call.replies)
            spans += [
                Span(device, f"recv:{wave}", wave, start, start, came, "inputs from the master"),
                Span(device, f"send:{wave}", wave, end, end, went, "replies to the master"),
            ]
        self.tracer.add(client, *spans)
        return outputs, done


def traced_fetch(fetch: FetchFrom, call: StageCall, tracer: Tracer) -> FetchFrom:
    """Returns a function that fetches as ``fetch`` does, and records a span for the time."""

    def timed(task: str, session: int, step: int, slot: int) -> AnyArray:
        start = concurrency.wall_time_ns()
        value = fetch(task, session, step, slot)
        span = Span(
            call.stage.device.name,
            f"fetch:{call.wave}",
            call.wave,
            start,
            concurrency.wall_time_ns(),
            nbytes([value]),
            f"straight from {task}",
        )
        tracer.add(session, span)
        return value

    return timed
