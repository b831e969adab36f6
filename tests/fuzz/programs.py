"""Mutated expression lists, sent to a ps on which a worker trains: registered there, and run.

Each goes through a child process first (`tests.runtime.expressions.fuzz`), which must not end. What
takes too long there is not sent: such a program ends a task by intent
(`runtime.task.program_watch`).
"""

from __future__ import annotations

import secrets
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import jax
import numpy as np

from runtime.errors import AbortedError, InternalError, OpError, UnavailableError, UnknownError
from runtime.expressions import reader
from runtime.expressions.reader import jax_settings, read_expressions
from runtime.master.tasks import RemoteTask
from runtime.plan.place import Device
from runtime.plan.plan import Program, ProgramOutput, Stage, StageCall
from runtime.tensor_spec import TensorSpec
from runtime.wire.dial import ChannelOptions
from tests.fuzz.victim import PS, Victim
from tests.runtime.expressions import fuzz as mutation
from tests.runtime.expressions.samples import SAMPLES
from tests.runtime.expressions.test_round_trip import A, written

ANSWER_SECS: Final = 120.0
CHECKS: Final = 20
CPU: Final = Device("ps", 0, "CPU", 0, "cpu")


def fuzz(count: int, seed: int) -> str:
    """Tries so many programs."""
    corpus = [written(fn, A) for fn in SAMPLES.values()]
    answers: Counter[str] = Counter()
    with Victim() as victim, Sender(victim) as sender:

        def tried(number: int) -> None:
            answers[sender.send(mutation.mutated(number, seed, corpus))] += 1
            if (number + 1) * CHECKS // count > number * CHECKS // count:
                victim.lives()

        outcome = mutation.fuzz(count, seed, tried=tried)
        victim.lives()
        story = victim.story()
    assert not outcome.crashed, f"programs that ended the process: {outcome.crashed}"
    sizes = [run for run in outcome.memory if len(run) > 1]
    assert all(run[-1] < 1.5 * run[0] for run in sizes), f"memory grows: {sizes}"
    return (
        f"{count:,} programs: {outcome.counts}; took too long: {outcome.slow}; sent to the ps: "
        f"{dict(answers)}; {story}"
    )


def fuzz_shapes(count: int, seed: int) -> str:
    """Tries so many long, deep and wide lists, in two processes that compile and run a share of them as a task does."""
    half = count // 2
    with ThreadPoolExecutor(2) as pool:
        halves = [
            pool.submit(mutation.fuzz, n, seed, at, kind="shapes")
            for at, n in ((0, half), (half, count - half))
        ]
        outcomes = [made.result() for made in halves]
    crashed, slow = [c for o in outcomes for c in o.crashed], [n for o in outcomes for n in o.slow]
    assert not crashed, f"lists that ended the process: {crashed}"
    return f"{count:,} lists: {dict(sum((Counter(o.counts) for o in outcomes), Counter()))}; took too long: {slow}"


class Sender:
    """A session of a worker that registers any program on the ps, and runs what is taken."""

    def __init__(self, victim: Victim) -> None:
        self._session = secrets.randbits(62) | 1
        self._task = RemoteTask(PS, victim.address, self._session, ChannelOptions())
        self._limit = reader.VALUE_BYTES

    def __enter__(self) -> Sender:
        """Meets the ps."""
        reader.VALUE_BYTES = mutation.VALUE_BYTES
        self._task.meet(self._task.status(None, "", ANSWER_SECS))
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves it."""
        reader.VALUE_BYTES = self._limit
        self._task.close(self._session)

    def send(self, data: bytes) -> str:
        """Has the ps run a program; gives the type of the error by which it has refused that, or "run"."""
        arguments, results = _specs(data)
        program = Program(data, arguments, results)
        slots = range(len(arguments), len(arguments) + len(results))
        outputs = tuple(ProgramOutput(i) for i in range(len(results)))
        stage = Stage(CPU, inputs=arguments, outputs=outputs, output_specs=results, program=program)
        call = StageCall(
            stage, 0, tuple(range(len(arguments))), tuple(slots), {}, {}, tuple(range(len(results)))
        )
        try:
            registered = self._task.register(call, frozenset(slots), ANSWER_SECS)
            lane = self._task.peer.acquire()
            try:
                lane.call(
                    registered.handle,
                    1,
                    [np.ones(s.shape, s.dtype) for s in arguments],
                    registered.reply_layout,
                )
            finally:
                self._task.peer.release(lane)
            self._task.unregister(self._session, [registered.handle])
        except (UnavailableError, AbortedError, InternalError, UnknownError):
            raise  # it is gone, or something has happened that nobody has thought of
        except OpError as error:
            assert "\n" not in error.message
            return type(error).__name__
        return "run"


def _specs(data: bytes) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The arguments and results of a program; of one that cannot be read, some."""
    any_specs = ((TensorSpec((2,), np.dtype(np.float32)),),) * 2
    try:
        expressions = read_expressions(data)
        with jax.enable_x64(True), jax_settings(expressions):
            avals = [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in expressions.arguments]
            results = jax.eval_shape(expressions.compute, *avals)
        return tuple(expressions.arguments), tuple(
            TensorSpec.of(result) for result in jax.tree.leaves(results)
        )
    # whatever JAX says of a program that is none; or its results are no tensors, but random keys
    except Exception:
        return any_specs
