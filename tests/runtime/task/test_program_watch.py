"""A program that does not end: the task that runs it ends itself, and the audit log says who has sent it."""

import contextlib
import json
import pathlib
import signal
import time
from typing import Any

import jax
import numpy as np
import psutil
import pytest

import runtime as rt
from tests.kit.processes import Program
from tests.kit.waits import until
from tests.runtime import kit
from tests.runtime.kit import in_thread

pytestmark = pytest.mark.cluster

PS = "/job:ps/task:0"
SECS = 2.0
BOUND = 60.0
"""Seconds until the end is seen, at most: many times the limit, on a machine that has other work."""


def endless(value: Any) -> Any:
    """Never ends, and XLA cannot know that."""
    return jax.lax.while_loop(lambda now: (now < np.inf).all(), lambda now: now * 0.5 + 1, value)


def environment(place: pathlib.Path, **others: str) -> dict[str, str]:
    return {
        "BELLWETHER_LIMITS": f"program_secs={SECS}",
        "BELLWETHER_AUDIT_LOG": str(place / "audit"),
        **others,
    }


def serve(cluster: dict[str, list[str]], place: pathlib.Path, **env: str) -> Program:
    return kit.serve(cluster, "ps", 0, env=environment(place, **env))


def audited(place: pathlib.Path, action: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (place / "audit").read_text().splitlines())
    return [line for line in lines if line["action"] == action]


def graph() -> tuple[rt.Graph, dict[str, Any]]:
    with rt.Graph().as_default() as made, rt.device(PS):
        w = rt.Variable(np.zeros(3, np.float32), name="w")
        other = rt.Variable(np.zeros(3, np.float32), name="other")
        return made, {
            "initialize": rt.global_variables_initializer(),
            "step": w.assign_add(np.ones(3, np.float32)),
            "w": w,
            "other": other.assign_add(np.ones(3, np.float32)),
            "hang": w.assign(rt.call(endless, w, name="hang")).op,
        }


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="on the connection's thread"),
        pytest.param({"PJRT_NPROC": "2"}, id="on a thread of XLA's", marks=pytest.mark.chaos),
    ],
)
def test_endless_loop_is_a_short_outage(env: dict[str, str], tmp_path: pathlib.Path) -> None:
    """A task with an endless program ends itself with a line that blames the program, and starts
    again.
    """
    cluster = kit.addresses(ps=1, worker=2)
    made, ops = graph()
    with rt.Server(cluster, "worker", 0) as good, rt.Server(cluster, "worker", 1) as bad:
        with serve(cluster, tmp_path, **env) as ps, rt.Session(good.target, made) as session:
            session.run(ops["initialize"])
            session.run(ops["step"])
            with rt.Session(bad.target, made) as hostile:
                thread, heard = in_thread(lambda: hostile.run(ops["hang"]))
                assert ps.wait(BOUND) == -signal.SIGKILL
                thread.join(BOUND)
            with pytest.raises((rt.AbortedError, rt.UnavailableError)):
                session.run(ops["step"])
            (ended,) = audited(tmp_path, "program.overrun")
            assert ended["task"] == PS and ended["outcome"] == "ended the task" and ended["peer"]
            told = f"{PS} ends itself: the program {ended['what']} of [w, hang, Assign], registered by {ended['peer']}"
            assert told in ps.story()
        assert isinstance(heard[0], rt.AbortedError | rt.UnavailableError)

        # Started again, as any task after kill -9; variables come from a checkpoint, here from the
        # initialiser.
        with serve(cluster, tmp_path, **env), rt.Session(good.target, made) as session:
            session.run(ops["initialize"])
            assert session.run(ops["step"]).tolist() == [1] * 3


BACKED_UP = kit.SERVE.replace("int(sys.argv[3])", "int(sys.argv[3]), ps_backups=1")


def test_backup_leaves_the_program_behind(
    tmp_path: pathlib.Path,
) -> None:
    """A task that goes on from its backup does not run the endless program again."""
    cluster = kit.addresses(ps=2, worker=2)

    def backed_up(index: int) -> Program:
        command = ("python", "-c", BACKED_UP, json.dumps(cluster), "ps", str(index))
        return Program(*command, env=environment(tmp_path))

    made, ops = graph()
    with (
        rt.Server(cluster, "worker", 0) as good,
        rt.Server(cluster, "worker", 1) as bad,
        backed_up(1),
    ):
        with (
            backed_up(0) as ps,
            rt.Session(good.target, made) as session,
            rt.Session(bad.target, made) as hostile,
        ):
            session.run(ops["initialize"])
            for _ in range(5):
                session.run(ops["step"])
            thread, heard = in_thread(lambda: hostile.run(ops["hang"]))
            assert ps.wait(BOUND) == -signal.SIGKILL
            # else the endless program is called again, and ends the next process as well
            hostile.close()
            thread.join(BOUND)
            assert isinstance(heard[0], rt.OpError)
            with backed_up(0) as again:
                again.expect("goes on from its backup at /job:ps/task:1")
                # in the same session: it has noticed a pause
                assert session.run(ops["step"]).tolist() == [6] * 3


LONG_SECS = 3.0
"""About how long the program computes that is frozen: longer than from one look of the watch to the next, before and
after, and a seventh of its limit, on a machine that has other work."""
FROZEN_LIMIT = 20.0
TRIES = 5


def counted(value: Any, trips: Any) -> Any:
    """So many rounds of work; in each the value grows by one."""

    def work(_: Any, carried: Any) -> Any:
        total, square = carried
        # it never is
        return total + jax.numpy.where(square[0, 0] > 2, 0.0, 1.0), jax.numpy.tanh(square @ square)

    return jax.lax.fori_loop(0, trips, work, (value, jax.numpy.eye(64) * 0.5))[0]


@pytest.mark.nightly
def test_frozen_time_does_not_count(tmp_path: pathlib.Path) -> None:
    """The time in which a process is frozen does not count for its program."""
    cluster = kit.addresses(ps=1, worker=1)
    with rt.Graph().as_default() as made, rt.device(PS):
        w = rt.Variable(np.float32(0), name="w")
        trips = rt.placeholder(np.int32, (), name="trips")
        add = w.assign(rt.call(counted, w, trips, name="counted")).op
    with rt.Server(cluster, "worker", 0) as worker:

        def run(fetch: Any, feeds: Any = None) -> Any:
            """In a session of its own: one whose task was silent for so long may have given it up."""
            with rt.Session(
                worker.target, made, rt.SessionConfig(start_timeout_secs=BOUND)
            ) as session:
                return session.run(fetch, feeds)

        with serve(cluster, tmp_path, BELLWETHER_LIMITS=f"program_secs={FROZEN_LIMIT}") as ps:
            process = psutil.Process(ps.pid)

            def processor_secs() -> float:
                spent = process.cpu_times()
                return float(spent.user + spent.system)

            run(w.initializer)
            run(add, {trips: 1})  # it is compiled
            rounds, total, spent = 1000, 1, 0.0
            while spent < LONG_SECS / 10:
                began, rounds = processor_secs(), rounds * 2
                run(add, {trips: rounds})
                total, spent = total + rounds, processor_secs() - began
            rounds = round(rounds * LONG_SECS / spent)
            for _ in range(TRIES):
                began, total = processor_secs(), total + rounds
                thread, _ = in_thread(lambda: run(add, {trips: rounds}))
                until(lambda: processor_secs() - began > LONG_SECS / 2, secs=BOUND)  # noqa: B023
                ps.freeze()
                before = processor_secs()
                # The test is one of time: a ps that is frozen for longer than the limit.
                time.sleep(FROZEN_LIMIT + 1)
                ps.thaw()
                thread.join(BOUND)  # with an answer, or because the task was silent
                goes_on = False
                with contextlib.suppress(AssertionError):  # it was over before
                    goes_on = until(
                        lambda: ps.code is not None or processor_secs() - before > LONG_SECS / 6,  # noqa: B023
                        secs=BOUND,
                    )
                assert ps.code is None, ps.story()
                assert run(w) == total  # the program has ended: it had the variable
                if goes_on:
                    break
            else:
                raise AssertionError("the program was over each time before the process was frozen")
            assert not audited(tmp_path, "program.overrun") and "ends itself" not in ps.story()
            run(add, {trips: 1})  # nobody has blamed it
            assert run(w) == total + 1
