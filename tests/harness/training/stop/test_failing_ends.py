"""What goes wrong while a run begins or ends costs that thing, and neither the last save nor the message."""

import gc
import os
import pathlib
import signal
import threading
from typing import Any

import pytest

import harness
import runtime as rt
from harness import exit_codes
from harness.training.stop import last_save
from harness.training.stop.preemption import preemptible, shielded

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("graph")]


class FailsAtTheEnd(harness.SessionRunHook):
    def end(self, session: rt.Session) -> None:
        raise ZeroDivisionError("in the end of a hook")


def test_failing_hook_spares_last_save(tmp_path: pathlib.Path) -> None:
    """A hook that fails at the end does not cost the last save."""
    more = harness.get_or_create_global_step().assign_add(1)
    session = harness.MonitoredTrainingSession(
        checkpoint_dir=str(tmp_path), hooks=[FailsAtTheEnd()], chief_only_hooks=[FailsAtTheEnd()]
    )
    with pytest.raises(ZeroDivisionError, match="in the end of a hook"), session:
        for _ in range(5):
            session.run(more)
    assert harness.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt" / "5")


class NoThreads:
    """A queue runner for which there is no thread."""

    def create_threads(self, *arguments: object, **options: object) -> list[threading.Thread]:
        raise ZeroDivisionError("no thread to be had")


def test_failed_services_close_the_session(tmp_path: pathlib.Path) -> None:
    """A session whose services cannot start is closed, and no thread is left."""
    with rt.Server({"worker": ["localhost:0"]}, "worker", 0) as server:
        harness.get_or_create_global_step()
        rt.get_default_graph().add_to_collection(rt.GraphKeys.QUEUE_RUNNERS, NoThreads())
        supervisor = harness.Supervisor(logdir=str(tmp_path))
        before = set(threading.enumerate())
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="no thread to be had"):
                supervisor.prepare_or_wait_for_session(server.target)
        with (
            pytest.raises(ZeroDivisionError, match="no thread to be had"),
            supervisor.managed_session(server.target),
        ):
            pass
        services = ("probe", "watch", "save", "write", "count")
        left = [t for t in set(threading.enumerate()) - before if t.name.startswith(services)]
        for thread in left:
            thread.join(30)
        assert [t.name for t in left if t.is_alive()] == []
        assert server.report().values["sessions"] == 0


def test_step_error_after_stop_is_raised() -> None:
    """An error of a step after request_stop is raised."""
    more = harness.get_or_create_global_step().assign_add(1)
    fed = rt.placeholder(rt.constant(1.0).dtype, [], name="fed")
    supervisor = harness.Supervisor(logdir=None)
    with (
        pytest.raises(rt.InvalidArgumentError, match="fed"),
        supervisor.managed_session("") as session,
    ):
        session.run(more)
        supervisor.request_stop()
        session.run(fed)


@pytest.mark.parametrize(
    "error", [rt.OutOfRangeError("no more input"), rt.CancelledError("stopped")]
)
def test_consequences_of_stop_are_silent(error: rt.OpError) -> None:
    """The errors that a stop leads to are not raised."""
    harness.get_or_create_global_step()
    supervisor = harness.Supervisor(logdir=None)
    with supervisor.managed_session(""):
        supervisor.request_stop()
        raise error


def test_raised_error_is_not_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """An error that is raised is not logged as dropped."""
    coord = harness.Coordinator()
    error = ValueError("of a thread")
    coord.request_stop(error)
    coord.request_stop(error)  # as the block of a session does, out of which it comes
    with pytest.raises(ValueError, match="of a thread"):
        coord.join()
    assert "not raised" not in caplog.text


# -- a log directory that cannot be looked into --------------------------------------------------------------------


@pytest.fixture
def closed_directory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A directory that its file server does not show just now."""
    scandir, iterdir, stat_of = os.scandir, os.listdir, os.stat

    def away(call: Any) -> Any:
        def called(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if str(path).startswith(str(tmp_path)):
                raise OSError(116, "Stale file handle", str(path))
            return call(path, *arguments, **options)

        return called

    for name, call in (("scandir", scandir), ("listdir", iterdir), ("stat", stat_of)):
        monkeypatch.setattr(os, name, away(call))
    return tmp_path


def test_loss_message_needs_no_directory(
    closed_directory: pathlib.Path,
) -> None:
    """The message of a loss does not need the log directory."""
    with pytest.raises(rt.UnavailableError):
        harness.latest_checkpoint(str(closed_directory))
    text = last_save.not_saved(15, str(closed_directory))
    assert (
        "what was done since the last checkpoint is not saved" in text
        and "Stale file handle" in text
    )


def test_saved_step_needs_no_directory(
    closed_directory: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The saved step is unknown, and logged so, when the log directory cannot be read."""
    assert last_save.saved_step(str(closed_directory)) is None
    assert "which checkpoint is the newest is not known" in caplog.text


# -- signals during a last save ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_survives_failed_save(number: int, caplog: pytest.LogCaptureFixture) -> None:
    """A signal is not lost when the save fails, and the error is logged."""
    with pytest.raises(SystemExit) as raised, preemptible(), shielded() as held:
        os.kill(os.getpid(), number)
        assert held == [number]
        raise rt.UnavailableError("lost meanwhile", task="/job:ps/task:0")
    row = exit_codes.INTERRUPTED if number == signal.SIGINT else exit_codes.PREEMPTED
    assert raised.value.code == row.plain
    assert "lost meanwhile" in caplog.text  # it may tell what is lost


def test_noting_handler_leaves_the_error() -> None:
    """A handler that only notes the signal leaves the error."""
    noted: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    try:
        with pytest.raises(rt.UnavailableError), shielded():
            os.kill(os.getpid(), signal.SIGTERM)
            raise rt.UnavailableError("lost meanwhile")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert noted == [signal.SIGTERM]


class Dies:
    """An object that a signal arrives at the end of."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


def at_the_end_of_an_object(number: int) -> None:
    Dies(number)


def in_the_collector(number: int) -> None:
    def collecting(phase: str, info: dict[str, int]) -> None:
        gc.callbacks.remove(collecting)
        signal.raise_signal(number)

    gc.callbacks.append(collecting)
    gc.collect()


@pytest.mark.chaos
@pytest.mark.parametrize("arrives", [at_the_end_of_an_object, in_the_collector])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_in_discarding_callback_arrives(arrives: Any, number: int) -> None:
    """A signal within a callback whose exceptions Python discards is raised all the same."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for _ in range(20):
            with pytest.raises(SystemExit), preemptible():
                arrives(number)
                threading.Event().wait(20)
                raise AssertionError("the signal was lost")
    finally:
        signal.signal(signal.SIGINT, before)
