"""Traced stages: stages and fetches of a task that are timed, for a plan that was registered to be traced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

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

    def place(self, values: Sequence[AnyArray]) -> Sequence[AnyArray]:
        """Returns values on the device of the stage; see ``PreparedStage.place``."""
        return self.prepared.place(values)

    def wait(self, done: jax.Array | None) -> None:
        """Waits until a run is done; see ``PreparedStage.wait``."""
        self.prepared.wait(done)

    def run(
        self, inputs: Sequence[AnyArray], client: int = 0, cancelled: Cancellation | None = None
    ) -> tuple[list[AnyArray], jax.Array | None]:
        """Runs the stage; see ``PreparedStage.run``."""
        call, begun = self.call, concurrency.wall_time_ns()
        is_accelerated = call.stage.is_accelerated
        if is_accelerated:
            # A program that is launched before its inputs are there would hide their copies.
            inputs = jax.block_until_ready(self.prepared.place(inputs))
        arrived = concurrency.wall_time_ns()
        outputs, done = self.prepared.run(inputs, client, cancelled)
        # XLA computes in the background, and the span shall have the whole time.
        self.prepared.wait(done)
        jax.block_until_ready(outputs)
        computed, taken = concurrency.wall_time_ns(), [outputs[i] for i in call.replies]
        if is_accelerated:
            # An array keeps its copy on the host, which the sender takes.
            jax.device_get(taken)
        end, went = concurrency.wall_time_ns(), nbytes(taken)
        label, names = _make_label(call), call.stage.operations
        spans = [_make_span(call, "stage", begun, end, nbytes(outputs), label, names)]
        if is_accelerated:
            spans += [
                _make_span(call, "h2d", begun, arrived, nbytes(inputs)),
                _make_span(call, "compute", arrived, computed),
                _make_span(call, "d2h", computed, end, went),
            ]
        # Without a lane the inputs come from this process, and nothing is received or sent.
        if current_lane():
            came = nbytes(value for i, value in enumerate(inputs) if i not in call.remote)
            spans += [
                _make_span(call, "recv", begun, begun, came, "inputs from the master"),
                _make_span(call, "send", end, end, went, "replies to the master"),
            ]
        self.tracer.add(client, *spans)
        return outputs, done


def _make_span(
    call: StageCall,
    kind: str,
    start_ns: int,
    end_ns: int,
    size: int = 0,
    label: str = "",
    operations: tuple[str, ...] = (),
) -> Span:
    device, wave = call.stage.device.name, call.wave
    return Span(device, f"{kind}:{wave}", wave, start_ns, end_ns, size, label, operations)


def _make_label(call: StageCall) -> str:
    names = call.stage.operations
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def traced_fetch(fetch: FetchFrom, call: StageCall, tracer: Tracer) -> FetchFrom:
    """Returns a function that fetches as ``fetch`` does, and records a span for the time."""

    def timed(task: str, session: int, step: int, slot: int) -> AnyArray:
        start = concurrency.wall_time_ns()
        value = fetch(task, session, step, slot)
        end, label = concurrency.wall_time_ns(), f"straight from {task}"
        tracer.add(session, _make_span(call, "fetch", start, end, nbytes([value]), label))
        return value

    return timed
