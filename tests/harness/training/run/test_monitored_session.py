"""Monitored sessions: the order of hooks, what they add to a step, how training ends, what a lost task does."""

import contextlib
import pathlib
import shutil
import threading
import time
from typing import Any

import pytest

import harness
import runtime as rt
from harness.checkpoints.layout import latest_checkpoint
from harness.tf1.inputs import queue_runner as tf1_queues
from harness.tf1.train import training as tf1_training
from harness.training import times
from harness.training.run.hooks import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from tests.kit.changes import SetTimes
from tests.kit.events import read_events
from tests.kit.losses import loss_of

pytestmark = pytest.mark.usefixtures("graph")


def counting() -> tuple[rt.Variable, rt.Tensor]:
    step = harness.get_or_create_global_step()
    return step, step.assign_add(1)


class Recorder(SessionRunHook):
    """Writes down what it is called for."""

    def __init__(self, story: list[str], name: str, args: SessionRunArgs | None = None) -> None:
        self.story = story
        self.name = name
        self.args = args
        self.values: list[Any] = []

    def begin(self) -> None:
        assert not rt.get_default_graph().finalized
        self.story.append(f"{self.name} begin")

    def after_create_session(self, session: rt.Session, coord: harness.Coordinator) -> None:
        assert session.graph.finalized
        self.story.append(f"{self.name} created")

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self.story.append(f"{self.name} before")
        return self.args

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.values.append(run_values.results)
        self.story.append(f"{self.name} after")

    def end(self, session: rt.Session) -> None:
        self.story.append(f"{self.name} end")


@pytest.mark.parametrize(
    "monitored",
    [
        pytest.param(True, marks=pytest.mark.nightly, id="MonitoredTrainingSession"),
        pytest.param(False, marks=pytest.mark.chaos, id="Supervisor"),
    ],
)
def test_chief_saves_when_ps_goes(
    tmp_path: pathlib.Path, set_times: SetTimes, monitored: bool
) -> None:
    """The chief saves when a task with variables has been told to go."""
    set_times(times, GOES_TOO_SECS=0.01)

    def saved() -> int:
        return int(pathlib.Path(latest_checkpoint(tmp_path) or "0").name)

    with rt.Server.create_local_server() as server:
        step, more = counting()
        session = (
            harness.MonitoredTrainingSession(
                server.target, checkpoint_dir=str(tmp_path), save_checkpoint_secs=3600
            )
            if monitored
            else harness.Supervisor(logdir=str(tmp_path), save_model_secs=0).managed_session(
                server.target
            )
        )
        with session as sess:
            for _ in range(5):
                sess.run(more)
            assert saved() == 0
            server.worker.store.run.go_at(time.monotonic() + 60)
            deadline = time.monotonic() + 60
            while saved() < 5:
                assert time.monotonic() < deadline
                sess.run(more)


def test_hooks_surround_each_step() -> None:
    """Hooks are called in order around each step, with their own fetches and feeds."""
    _, more = counting()
    x = rt.placeholder("float32", [], name="x")
    doubled = x * 2.0
    story: list[str] = []
    first = Recorder(story, "a", SessionRunArgs({"twice": doubled}, {x: 4.0}))
    second = Recorder(story, "b")
    feeds: dict[Any, Any] = {}
    with harness.MonitoredSession(hooks=[first, second]) as sess:
        assert sess.run(more, feeds) == 1
        assert sess.run([more, {"v": more}]) == [2, {"v": 2}]
    step = ["a before", "b before", "a after", "b after"]
    assert story == ["a begin", "b begin", "a created", "b created", *step, *step, "a end", "b end"]
    assert first.values == [{"twice": 8.0}, {"twice": 8.0}]
    assert second.values == [None, None]
    assert feeds == {}
    assert sess.should_stop()


def test_tensor_fed_twice_is_refused() -> None:
    """A tensor that two hooks feed is refused."""
    counting()
    x = rt.placeholder("float32", [], name="x")
    hooks = [
        Recorder([], "a", SessionRunArgs(None, {x: 1.0})),
        Recorder([], "b", SessionRunArgs(None, {x: 1.0})),
    ]
    with pytest.raises(RuntimeError, match="Same tensor is fed"):
        with harness.MonitoredSession(hooks=hooks) as sess:
            sess.run(x)


def test_saver_accepts_monitored_session(tmp_path: pathlib.Path) -> None:
    """A Saver saves and restores by a monitored session."""
    step = harness.get_or_create_global_step()
    more = step.assign_add(1)
    saver = harness.Saver()
    with harness.MonitoredSession() as sess:
        for _ in range(3):
            sess.run(more)
        path = saver.save(sess, str(tmp_path / "own"), step)
        sess.run(more)
        saver.restore(sess, path)
        assert sess.run(step) == 3


def test_hook_stops_training() -> None:
    """A hook stops training after the run that is under way."""

    class Stop(SessionRunHook):
        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            run_context.request_stop()

    _, more = counting()
    with harness.MonitoredSession(hooks=[Stop()]) as sess:
        assert sess.run(more) == 1  # this run still gives its value
        assert sess.should_stop()
        with pytest.raises(RuntimeError, match="should_stop requested"):
            sess.run(more)


@pytest.mark.parametrize(
    ("error", "ends"), [(rt.OutOfRangeError, True), (StopIteration, True), (ValueError, False)]
)
def test_end_of_input_ends_block(error: type[Exception], ends: bool) -> None:
    """The end of the input ends the block cleanly, and any other error leaves the block."""
    counting()
    story: list[str] = []

    def block() -> None:
        with harness.MonitoredSession(hooks=[Recorder(story, "a")]):
            raise error("x")

    if ends:
        block()
    else:
        with pytest.raises(error):
            block()
    assert ("a end" in story) == ends


def test_closed_session_refuses_runs() -> None:
    """A closed monitored session refuses a second close and further runs."""
    _, more = counting()
    sess = harness.MonitoredSession()
    sess.close()
    assert sess.should_stop()
    with pytest.raises(RuntimeError, match="Session is already closed"):
        sess.close()
    with pytest.raises(RuntimeError, match="Session is already closed"):
        sess.run(more)
    rt.constant(1)  # the graph is open again


def test_thread_failure_shows_in_run() -> None:
    """The error of a failed thread is raised by the next run."""
    _, more = counting()

    class Broken(tf1_queues.QueueRunner):
        def create_threads(
            self, sess: Any, coord: Any = None, **options: Any
        ) -> list[threading.Thread]:
            return [harness.LooperThread.loop(coord, None, self.read)]

        def read(self) -> None:
            raise OSError("disk full")

    tf1_queues.add_queue_runner(Broken.__new__(Broken))
    inside = None
    with pytest.raises(OSError, match="disk full") as caught:
        with harness.MonitoredSession() as sess:
            try:
                while True:  # a loop that never asks should_stop()
                    sess.run(more)
            except OSError as error:
                inside = error
                raise
    assert inside is caught.value
    assert caught.traceback[-1].name == "read"


def test_run_step_fn_gives_context() -> None:
    """run_step_fn gives a step function the raw session, the hooks and the stop."""
    step, more = counting()
    story: list[str] = []
    with harness.MonitoredSession(hooks=[Recorder(story, "a")]) as sess:

        def bare(step_context: Any) -> Any:
            return step_context.session.run(more)

        assert sess.run_step_fn(bare) == 1
        assert "a before" not in story
        assert sess.run_step_fn(lambda step_context: step_context.run_with_hooks(more)) == 2
        assert "a before" in story
        with pytest.raises(ValueError, match="step_context"):
            sess.run_step_fn(lambda other: None)
        assert sess.run_step_fn(lambda step_context: step_context.request_stop()) is None
        assert sess.should_stop()


@pytest.mark.parametrize("error", [rt.AbortedError, rt.UnavailableError])
def test_lost_task_repeats_the_step(error: type[rt.OpError]) -> None:
    """After a lost task a new session repeats the step with its hooks."""
    _, more = counting()
    story: list[str] = []

    class Fails(SessionRunHook):
        fails = 2

        def before_run(self, run_context: SessionRunContext) -> None:
            if self.fails:
                self.fails -= 1
                raise loss_of(run_context.session, error("gone", task="/job:ps/task:0"))

    server = rt.Server.create_local_server()
    with harness.MonitoredTrainingSession(
        server.target, hooks=[Recorder(story, "a"), Fails()]
    ) as sess:
        assert sess.run(more) == 1
    server.stop()
    again = ["a created", "a before"]
    assert story == ["a begin", *again, *again, *again, "a after", "a end"]


def test_replaced_session_repeats_the_step() -> None:
    """A step whose session another thread replaces is run again."""
    _, more = counting()
    story: list[str] = []

    class Replaces(SessionRunHook):
        done = False

        def before_run(self, run_context: SessionRunContext) -> None:
            # as the thread does that looks after the tasks, while this one is in its step
            if not self.done:
                self.done = True
                arguments = (run_context.session, loss_of(run_context.session))
                other = threading.Thread(target=sess.managed.recover, args=arguments)
                other.start()
                other.join(30)

    server = rt.Server.create_local_server()
    with harness.MonitoredTrainingSession(
        server.target, hooks=[Recorder(story, "a"), Replaces()]
    ) as sess:
        assert sess.run(more) == 1
    server.stop()
    again = ["a created", "a before"]
    assert story == ["a begin", *again, *again, "a after", "a end"]


def test_singular_session_raises_losses() -> None:
    """A singular session raises the loss of a task."""
    _, more = counting()

    class Fails(SessionRunHook):
        def before_run(self, run_context: SessionRunContext) -> None:
            raise rt.AbortedError("gone")

    with pytest.raises(rt.AbortedError):
        with tf1_training.SingularMonitoredSession(hooks=[Fails()]) as sess:
            assert isinstance(sess.raw_session(), rt.Session)
            sess.run(more)


def test_error_of_block_is_raised() -> None:
    """A loss that the block itself raises is not retried."""
    counting()
    with pytest.raises(rt.AbortedError):
        with harness.MonitoredSession():
            raise rt.AbortedError("of the user's own")


# -- MonitoredTrainingSession --------------------------------------------------------------------------------------


def steps_in(directory: pathlib.Path) -> set[int]:
    return {int(p.name) for p in (directory / "model.ckpt").iterdir() if p.name.isdigit()}


def test_checkpoints_frame_each_run(tmp_path: pathlib.Path, graph: rt.Graph) -> None:
    """A run saves at its start and end, and the next run begins there."""
    for start in (0, 250):
        with rt.Graph().as_default():
            step, more = counting()
            stop = harness.StopAtStepHook(num_steps=250)
            with harness.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path), hooks=[stop]
            ) as sess:
                assert sess.run(step) == start
                while not sess.should_stop():
                    sess.run(more)
        assert steps_in(tmp_path) == {*range(0, start + 251, 250)}


def test_two_checkpoint_intervals_are_refused(tmp_path: pathlib.Path) -> None:
    """Two intervals of checkpoints are refused."""
    counting()
    with pytest.raises(ValueError, match="both every_secs and every_steps"):
        harness.MonitoredTrainingSession(
            checkpoint_dir=str(tmp_path), save_checkpoint_secs=1, save_checkpoint_steps=1
        )


def test_directory_needs_a_global_step(tmp_path: pathlib.Path) -> None:
    """A checkpoint directory needs a global step."""
    rt.Variable(1.0)
    with pytest.raises(RuntimeError, match="Global step should be created"):
        harness.MonitoredTrainingSession(checkpoint_dir=str(tmp_path))


def test_no_directory_means_no_files(tmp_path: pathlib.Path) -> None:
    """Without a directory no file is written."""
    _, more = counting()
    with contextlib.chdir(tmp_path), harness.MonitoredTrainingSession() as sess:
        sess.run(more)
    assert list(tmp_path.iterdir()) == []


def test_workers_have_own_hooks_only(tmp_path: pathlib.Path) -> None:
    """A worker that is not the chief has its own hooks only and writes no file."""
    story: list[str] = []
    server = rt.Server.create_local_server()
    counting()
    with rt.Session(server.target) as chief:
        chief.run(rt.global_variables_initializer())
        with harness.MonitoredTrainingSession(
            server.target,
            is_chief=False,
            checkpoint_dir=str(tmp_path),
            hooks=[Recorder(story, "mine")],
            chief_only_hooks=[Recorder(story, "chief's")],
        ):
            pass
    server.stop()
    assert story == ["mine begin", "mine created", "mine end"]
    assert list(tmp_path.iterdir()) == []


def test_chief_hooks_have_an_order(tmp_path: pathlib.Path) -> None:
    """The chief's hooks come in the order of TensorFlow."""
    counting()
    mine, chiefs = Recorder([], "mine"), Recorder([], "chief's")
    sess = harness.MonitoredTrainingSession(
        checkpoint_dir=str(tmp_path), hooks=[mine], chief_only_hooks=[chiefs]
    )
    kinds = [type(h).__name__ for h in sess.hooks]
    sess.close()
    assert kinds == [
        "Recorder",
        "StepCounterHook",
        "SummarySaverHook",
        "CheckpointSaverHook",
        "Recorder",
    ]


# -- Scaffold ------------------------------------------------------------------------------------------------------


def test_scaffold_fills_missing_parts(graph: rt.Graph) -> None:
    """A scaffold makes its missing parts and shares them with later scaffolds of the graph."""
    counting()
    first = harness.Scaffold().finalize()
    assert first.init_op is not None and first.ready_op is not None and first.saver is not None
    assert graph.finalized
    second = harness.Scaffold().finalize()
    assert second.init_op is first.init_op and second.saver is first.saver


def test_scaffold_refuses_an_ambiguous_collection(graph: rt.Graph) -> None:
    """A scaffold refuses a collection with two items, unless the part is given."""
    counting()
    both = [rt.no_op(), rt.no_op()]
    for op in both:
        graph.add_to_collection(rt.GraphKeys.INIT_OP, op)
    with pytest.raises(RuntimeError, match="More than one item"):
        harness.Scaffold().finalize()
    assert harness.Scaffold(init_op=both[1]).finalize().init_op is both[1]


def test_scaffold_init_fn_takes_two_arguments() -> None:
    """The init_fn of a scaffold receives the scaffold and the session."""
    step, _ = counting()
    seen: list[Any] = []
    scaffold = harness.Scaffold(
        init_fn=lambda scaffold, session: seen.append((scaffold, session.run(step)))
    )
    with harness.MonitoredTrainingSession(scaffold=scaffold):
        pass
    assert seen == [(scaffold, 0)]


def test_scaffold_copies_another() -> None:
    """A scaffold copies the parts of another, and refuses other objects."""
    op = rt.no_op()
    first = harness.Scaffold(init_op=op)
    first.tag = "an attribute of the program's own"  # type: ignore[attr-defined]
    assert harness.Scaffold(copy_from_scaffold=first).init_op is op
    with pytest.raises(TypeError, match="not a Scaffold"):
        harness.Scaffold(copy_from_scaffold=op)


def test_restored_models_skip_the_init_fn(tmp_path: pathlib.Path) -> None:
    """A restored model skips the init_fn."""
    called = []
    for _ in range(2):
        with rt.Graph().as_default():
            _, more = counting()
            scaffold = harness.Scaffold(init_fn=lambda scaffold, session: called.append(1))
            with harness.MonitoredTrainingSession(
                scaffold=scaffold, checkpoint_dir=str(tmp_path)
            ) as sess:
                sess.run(more)
    assert called == [1]
    assert str(latest_checkpoint(str(tmp_path))).endswith("/2")


def test_session_ends_its_event_writer(tmp_path: pathlib.Path) -> None:
    """A directory that is removed between two runs of a process holds the events of the second."""
    before = set(threading.enumerate())  # writers of other tests may be among them
    for _ in range(2):
        with rt.Graph().as_default():
            _, more = counting()
            options: dict[str, Any] = {"save_summaries_steps": None, "log_step_count_steps": 1}
            with harness.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path), **options
            ) as session:
                for _ in range(5):
                    session.run(more)
        (events,) = tmp_path.glob("events*")
        assert any(
            value.tag == "global_step/sec"
            for e in read_events(str(events))
            for value in e.summary.value
        )
        left = set(threading.enumerate()) - before
        assert not [thread.name for thread in left if thread.name.startswith("events ")]
        shutil.rmtree(tmp_path)


def test_finished_run_trains_no_step(tmp_path: pathlib.Path) -> None:
    """A run that has reached its last step trains no further step."""
    for steps in (5, 0, 0):
        with rt.Graph().as_default():
            _, more = counting()
            done = 0
            stop = harness.StopAtStepHook(last_step=5)
            with harness.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path), hooks=[stop]
            ) as session:
                while not session.should_stop():
                    session.run(more)
                    done += 1
            assert done == steps


def test_saving_hook_suits_all_tasks(tmp_path: pathlib.Path) -> None:
    """A hook that saves may be given to all tasks, and only the chief saves."""
    with rt.local_cluster(ps=1, workers=2) as cluster:
        opened = []
        for worker in range(2):
            with rt.Graph().as_default(), cluster.device(worker):
                _, more = counting()
                hooks = [harness.CheckpointSaverHook(str(tmp_path), save_steps=1)]
                session = harness.MonitoredTrainingSession(
                    cluster.target_of(worker), worker == 0, hooks=hooks
                )
                opened.append((session, more))
        for session, more in reversed(opened):
            for _ in range(3):
                session.run(more)
            session.close()
    assert latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt" / "6")


@pytest.mark.parametrize("error", [RuntimeError("of the hook"), rt.CancelledError("of the hook")])
def test_hooks_own_error_is_raised(error: Exception) -> None:
    """An error of a hook is raised, even where another thread has replaced the session meanwhile."""

    class Fails(harness.SessionRunHook):
        def after_run(
            self, run_context: harness.SessionRunContext, run_values: harness.SessionRunValues
        ) -> None:
            loss = rt.AbortedError("lost")
            loss.session = run_context.session.id
            recovery = threading.Thread(
                target=session.managed.recover, args=(run_context.session, loss)
            )
            recovery.start()
            recovery.join()
            raise error

    with rt.Server.create_local_server() as server, rt.Graph().as_default():
        more = harness.get_or_create_global_step().assign_add(1)
        creator = harness.ChiefSessionCreator(master=server.target)
        with pytest.raises(type(error), match="of the hook"):
            with harness.MonitoredSession(creator, [Fails()]) as session:
                session.run(more)
