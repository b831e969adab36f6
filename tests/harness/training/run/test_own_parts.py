"""Parts of the user's own: a saver that can do no more than it must, hooks that cannot write or that fail."""

import pathlib
import shutil
import threading
from typing import Any

import pytest

import harness
import runtime as rt
from harness.monitoring.program import StepProfiler
from harness.tf1.inputs import queue_runner as tf1_queues
from harness.tf1.train import training as tf1_training

pytestmark = pytest.mark.usefixtures("graph")


class PlainSaver:
    """No more than what a Supervisor asks for."""

    def __init__(self) -> None:
        self.saved: list[tuple[str, int]] = []

    def save(self, sess: rt.Session, path: str, global_step: Any = None) -> str:
        step = int(sess.run(global_step))
        self.saved.append((path, step))
        return f"{path}-{step}"

    def restore(self, sess: rt.Session, path: str) -> None:
        raise AssertionError("there is nothing to restore")


def test_plain_saver_is_enough(tmp_path: pathlib.Path) -> None:
    """A saver that only saves and restores serves a Supervisor."""
    more = harness.get_or_create_global_step().assign_add(1)
    saver = PlainSaver()
    sv = harness.Supervisor(logdir=str(tmp_path), saver=saver, save_summaries_secs=0)
    with sv.managed_session("") as sess:
        for _ in range(5):
            sess.run(more)
    path = str(tmp_path / "model.ckpt")
    assert saver.saved[-1] == (path, 5) and {p for p, _ in saver.saved} == {path}


def test_saver_without_restore_is_refused(tmp_path: pathlib.Path) -> None:
    """A saver that cannot restore is refused."""

    class Half:
        def save(self) -> None:
            pass

    with pytest.raises(TypeError, match=r"saver has no restore\(\)"):
        harness.Supervisor(logdir=str(tmp_path), saver=Half())


def test_homeless_summary_hook_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """A summary hook without a directory writes no summary and warns once."""
    more = harness.get_or_create_global_step().assign_add(1)
    op = harness.summary.scalar("one", rt.constant(1.0))
    with harness.MonitoredSession(
        hooks=[harness.SummarySaverHook(save_steps=1, summary_op=op)]
    ) as sess:
        for step in range(3):
            assert sess.run(more) == step + 1
    assert caplog.text.count("no output_dir and no summary_writer") == 1


class Fails(harness.SessionRunHook):
    def after_create_session(self, session: rt.Session, coord: harness.Coordinator) -> None:
        self.session = session
        raise ZeroDivisionError("in after_create_session")


def test_failed_begin_leaves_no_session() -> None:
    """A monitored session that cannot begin leaves no session and no thread, and the graph open."""
    with rt.Server({"worker": ["localhost:0"]}, "worker", 0) as server:
        harness.get_or_create_global_step()
        queue = rt.FIFOQueue(1, [rt.constant(1).dtype], shapes=[()])
        runner = tf1_queues.QueueRunner(queue, [queue.enqueue(rt.constant(1))])
        tf1_queues.add_queue_runner(runner)
        before = set(threading.enumerate())
        hooks = []
        for _ in range(3):
            hooks.append(Fails())
            with pytest.raises(ZeroDivisionError, match="in after_create_session"):
                harness.MonitoredSession(
                    harness.ChiefSessionCreator(master=server.target), hooks[-1:]
                )
        for hook in hooks:
            with pytest.raises(RuntimeError, match="closed"):
                hook.session.run(rt.get_default_graph().get_operations()[0])
        left = [
            t
            for t in set(threading.enumerate()) - before
            if t.name.startswith(("probe", "watch", "queue"))
        ]
        for thread in left:
            thread.join(30)
        assert [t.name for t in left if t.is_alive()] == []
        assert server.report().values["sessions"] == 0
        assert not rt.get_default_graph().finalized


def test_unwritable_timeline_costs_itself(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A timeline that cannot be written costs itself only."""
    more = harness.get_or_create_global_step().assign_add(1)
    directory = tmp_path / "traces"
    with harness.MonitoredSession(
        hooks=[tf1_training.ProfilerHook(save_steps=2, output_dir=str(directory))]
    ) as sess:
        shutil.rmtree(directory)
        directory.write_text("no directory any more")
        for _ in range(5):
            sess.run(more)
    assert "the timeline is not written" in caplog.text


def test_unwritable_profile_costs_itself(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A profile that cannot be written costs itself only."""
    (tmp_path / "plugins").write_text("no directory")
    with StepProfiler(0, 1, str(tmp_path)) as profiler:
        for step in range(3):
            profiler.step(step)
    assert "the profile is not written" in caplog.text
