"""The Supervisor in one process: what it makes of a graph, its services, its ways to stop."""

import inspect
import pathlib
import threading
import time
from typing import Any

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

import harness
import runtime as rt
from harness.checkpoints.layout import latest_checkpoint
from harness.training import times
from tests.kit.changes import SetTimes
from tests.kit.waits import until

pytestmark = pytest.mark.usefixtures("graph")


def counting() -> tuple[rt.Variable, rt.Tensor]:
    step = harness.get_or_create_global_step()
    return step, step.assign_add(1)


def events(logdir: pathlib.Path) -> list[event_pb2.Event]:
    found = []
    for path in sorted(logdir.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            found.append(event_pb2.Event.FromString(data[12 : 12 + length]))
            data = data[12 + length + 4 :]
    return found


def marks(logdir: pathlib.Path) -> list[tuple[str, int]]:
    name = event_pb2.SessionLog.SessionStatus.Name
    return [
        (name(e.session_log.status), e.step) for e in events(logdir) if e.HasField("session_log")
    ]


# -- construction ------------------------------------------------------------------------------------------------


def test_supervisor_has_defaults() -> None:
    """A Supervisor makes its default parts and finalizes the graph."""
    step, _ = counting()
    harness.summary.scalar("s", 1.0)
    sv = harness.Supervisor()
    assert sv.is_chief
    assert sv.global_step is step
    assert (
        sv.init_op is not None
        and sv.ready_op is not None
        and sv.summary_op is not None
        and sv.saver is not None
    )
    assert sv.ready_for_local_init_op is None
    assert (sv.save_model_secs, sv.save_summaries_secs, sv.save_path) == (600, 120, None)
    assert sv.summary_writer is None  # no logdir
    assert step.graph.finalized
    with pytest.raises(RuntimeError, match="Graph is finalized"):
        rt.constant(1)


@pytest.mark.parametrize(
    "part", ["global_step", "summary_op", "saver", "save_path", "summary_writer"]
)
def test_service_parts_cannot_be_set(part: str, tmp_path: pathlib.Path) -> None:
    """A part that the services hold cannot be set."""
    counting()
    sv = harness.Supervisor(logdir=tmp_path)
    with pytest.raises(AttributeError, match=part):
        setattr(sv, part, None)


def test_none_turns_parts_off() -> None:
    """None turns a part off, and 0 means the default."""
    counting()
    sv = harness.Supervisor(init_op=0, ready_op=None, saver=None, global_step=None, summary_op=None)
    assert sv.init_op is not None
    assert (sv.ready_op, sv.saver, sv.global_step, sv.summary_op) == (None,) * 4


def test_collections_give_the_defaults(graph: rt.Graph) -> None:
    """The collections of the graph give the default parts."""
    v = rt.Variable(1.0, name="v")
    graph.add_to_collection(rt.GraphKeys.INIT_OP, v.initializer)
    graph.add_to_collection(rt.GraphKeys.INIT_OP, rt.no_op())
    assert harness.Supervisor(saver=None).init_op is v.initializer


def test_text_global_step_is_ignored() -> None:
    """A global step that holds text is ignored."""
    rt.Variable("none", name="global_step")
    assert harness.Supervisor().global_step is None


def test_workers_write_no_files(tmp_path: pathlib.Path) -> None:
    """A worker that is not the chief writes no file and has no services."""
    counting()
    sv = harness.Supervisor(is_chief=False, logdir=tmp_path / "run")
    assert (sv.save_path, sv.summary_writer, sv.save_summaries_secs, sv.save_model_secs) == (
        None,
    ) * 4
    assert not (tmp_path / "run").exists()
    with pytest.raises(RuntimeError, match="Only chief supervisor can start standard services"):
        sv.start_standard_services(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["save_model_secs", "save_summaries_secs", "recovery_wait_secs", "stop_grace_secs"]
)
def test_negative_seconds_are_refused(name: str) -> None:
    """Negative seconds are refused by name."""
    with pytest.raises(ValueError, match=name):
        harness.Supervisor(**{name: -1})  # type: ignore[arg-type]


def test_parameters_have_tensorflows_order() -> None:
    """The parameters of Supervisor have TensorFlow's order and defaults."""
    given = "ready_op ready_for_local_init_op is_chief init_op init_feed_dict local_init_op logdir summary_op saver"
    then = "global_step save_summaries_secs save_model_secs recovery_wait_secs stop_grace_secs checkpoint_basename"
    names = ["graph", *given.split(), *then.split(), "session_manager", "summary_writer", "init_fn"]
    found = inspect.signature(harness.Supervisor).parameters
    assert [name for name, p in found.items() if p.kind is not p.KEYWORD_ONLY] == names
    default = harness.Supervisor.USE_DEFAULT
    usual = [name for name in names if found[name].default is default]
    assert usual == [n for n in names if n.endswith("_op")] + [
        "saver",
        "global_step",
        "summary_writer",
    ]
    secs = {name: found[name].default for name in names if name.endswith("_secs")}
    assert secs == {
        "save_summaries_secs": 120,
        "save_model_secs": 600,
        "recovery_wait_secs": 30,
        "stop_grace_secs": 120,
    }


def of_another_graph() -> rt.Operation:
    with rt.Graph().as_default():
        return rt.Variable(1.0, name="elsewhere").initializer


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("graph", "g", TypeError, "graph is a runtime.Graph or None, not 'g'"),
        ("is_chief", "False", TypeError, "is_chief is True or False, not 'False'"),
        ("logdir", 5, TypeError, "logdir is the path of a directory or None, not 5"),
        (
            "checkpoint_basename",
            "",
            ValueError,
            "checkpoint_basename is the first part of the checkpoints' names",
        ),
        (
            "init_feed_dict",
            [1],
            TypeError,
            r"init_feed_dict is a dict of tensors to values, not \[1\]",
        ),
        ("init_fn", 5, TypeError, "init_fn is a function of the session, not 5"),
        ("save_model_secs", "600", TypeError, "save_model_secs is a number of seconds, not '600'"),
        ("stop_grace_secs", None, TypeError, "stop_grace_secs is a number of seconds, not None"),
        (
            "recovery_wait_secs",
            float("nan"),
            ValueError,
            "recovery_wait_secs is a number of seconds and cannot be nan",
        ),
        ("saver", "s", TypeError, r"saver has no save\(\) and no restore\(\): 's'"),
        (
            "session_manager",
            "m",
            TypeError,
            r"session_manager has no prepare_session\(\) and no wait_for_session\(\)",
        ),
        ("summary_writer", "w", TypeError, r"summary_writer has no add_summary\(\)"),
        ("init_op", "nope", ValueError, "init_op: the graph has no operation 'nope'"),
        (
            "init_op",
            of_another_graph(),
            ValueError,
            "init_op: 'elsewhere/Assign' is not an element of this graph",
        ),
        ("local_init_op", 5, TypeError, "local_init_op: 5 has invalid type int"),
        ("ready_op", [], TypeError, "ready_op: .* has invalid type list"),
        (
            "ready_for_local_init_op",
            {},
            TypeError,
            "ready_for_local_init_op: .* has invalid type dict",
        ),
        (
            "global_step",
            "word:0",
            ValueError,
            "global_step is a variable that holds a number, not .*word:0",
        ),
        (
            "summary_op",
            "half:0",
            ValueError,
            "summary_op is a string tensor of a serialized summary, not .*half:0",
        ),
    ],
)
def test_wrong_supervisor_arguments_are_named(
    name: str, value: Any, error: type[Exception], words: str
) -> None:
    """Wrong arguments of Supervisor are refused at once and by name."""
    counting()
    rt.constant(np.float32(0.5), name="half")
    rt.constant("one", name="word")
    with pytest.raises(error, match=words):
        harness.Supervisor(**{name: value})


def test_device_filters_cover_the_graph(graph: rt.Graph) -> None:
    """The default device filters hold the tasks that the graph needs."""
    from harness.training.start.readiness import default_filters

    with rt.device("/job:ps/task:1"):
        v = rt.Variable(1.0)
    with rt.device("/job:worker/task:2"):
        v + 1.0
    with rt.device("/job:worker"):  # its own task, whichever that is
        v + 1.0
    assert default_filters(graph) == ("/job:ps", "/job:ps/task:1", "/job:worker/task:2")
    rt.Variable(1.0)  # may live anywhere
    assert default_filters(graph) == ()


# -- a session ---------------------------------------------------------------------------------------------------


def test_initialisation_has_an_order(target: str) -> None:
    """init_op runs first, then init_fn, then the local initialisation."""
    v = rt.Variable(1.0, name="v")
    seen = []
    local = rt.Variable(v.initialized_value() * 10.0, name="local", local=True)
    sv = harness.Supervisor(
        init_fn=lambda sess: seen.append(sess.run(v)), ready_for_local_init_op=None
    )
    with sv.managed_session(target) as sess:
        assert seen == [1.0]
        assert sess.run(local) == 10.0


def test_init_feed_dict_is_fed(target: str) -> None:
    """init_feed_dict is fed to init_op."""
    x = rt.placeholder(np.float32, [], name="x")
    v = rt.Variable(x * 2.0, name="v")
    with harness.Supervisor(init_feed_dict={x: 21.0}).managed_session(target) as sess:
        assert sess.run(v) == 42.0


def test_uninitialized_variables_are_named(target: str) -> None:
    """Variables that init_op leaves uninitialized are named."""
    v, w = rt.Variable(1.0, name="v"), rt.Variable(1.0, name="w")
    sv = harness.Supervisor(init_op=v.initializer)
    with pytest.raises(RuntimeError, match=f"Variables not initialized: {w.op.name}"):
        with sv.managed_session(target):
            pytest.fail("not ready")


def test_starved_init_fn_is_an_error(target: str) -> None:
    """An init_fn that meets the end of its data is an error, not the end of training."""
    counting()

    def starved(session: rt.Session) -> None:
        raise rt.OutOfRangeError("no data to begin with")

    sv = harness.Supervisor(init_fn=starved)
    with pytest.raises(
        RuntimeError, match="The model could not be made ready: no data to begin with"
    ):
        with sv.managed_session(target):
            pytest.fail("not ready")


def test_ready_for_local_init_is_checked(
    target: str,
) -> None:
    """The needs of local initialisation are checked without local variables too."""
    v = rt.Variable(1.0, name="v")
    w = rt.Variable(1.0, name="w")
    sv = harness.Supervisor(
        init_op=v.initializer,
        ready_op=None,
        ready_for_local_init_op=rt.report_uninitialized_variables([w]),
    )
    with pytest.raises(RuntimeError, match="did not make model ready for local_init.*w"):
        with sv.managed_session(target):
            pytest.fail("not ready")
    with rt.Graph().as_default():
        w = rt.Variable(1.0, name="w")
        with pytest.raises(ValueError, match="you must also pass a local_init_op"):
            harness.Supervisor(
                local_init_op=None, ready_for_local_init_op=rt.report_uninitialized_variables([w])
            )


def test_missing_initialisation_is_an_error(target: str) -> None:
    """A Supervisor without any way to initialise is an error."""
    rt.Variable(1.0, name="v")
    sv = harness.Supervisor(init_op=None)
    with pytest.raises(RuntimeError, match="no init_op or init_fn or local_init_op was given"):
        with sv.managed_session(target):
            pytest.fail("not ready")


def test_live_model_is_kept(target: str) -> None:
    """A second session keeps the live model."""
    _, more = counting()
    sv = harness.Supervisor(saver=None)
    with sv.managed_session(target) as sess:
        sess.run(more)
    with sv.managed_session(target) as sess:  # the classic Supervisor would initialise again
        assert not sv.should_stop()
        assert sess.run(sv.global_step) == 1


def test_own_process_session_starts_anew() -> None:
    """A session in the own process starts anew."""
    _, more = counting()
    sv = harness.Supervisor(saver=None)
    for _ in range(2):
        with sv.managed_session("") as sess:
            assert sess.run(more) == 1


def test_checkpoint_beats_init_fn(tmp_path: pathlib.Path) -> None:
    """A checkpoint wins over init_op and init_fn."""
    _, more = counting()
    called = []
    sv = harness.Supervisor(logdir=tmp_path, init_fn=lambda sess: called.append(1))
    with sv.managed_session() as sess:
        for _ in range(5):
            sess.run(more)
    with sv.managed_session() as sess:
        assert sess.run(sv.global_step) == 5
    assert called == [1]


def test_service_failure_ends_waiting_step(target: str, set_times: SetTimes) -> None:
    """The failure of a service is raised by a step that waits."""
    set_times(times, FAILURE_GRACE_SECS=0.1)
    counting()
    never = rt.FIFOQueue(1, np.int64, ()).dequeue()
    sv = harness.Supervisor(saver=None)

    def fail() -> None:
        threading.Event().wait(0.3)  # meanwhile the step has begun; the test holds if it has not
        raise ValueError("the service broke")

    raised = None
    with pytest.raises(ValueError, match="the service broke"), sv.managed_session(target) as sess:
        sv.loop(None, fail)
        try:
            sess.run(never)
        except Exception as error:
            raised = error
            raise
    assert isinstance(raised, ValueError)


def test_workers_wait_for_init_fn(target: str) -> None:
    """Workers wait until the chief's init_fn is over."""
    counting()
    other_graph = rt.Graph()
    joined = threading.Event()

    def other() -> None:
        with other_graph.as_default():
            counting()
            sv = harness.Supervisor(is_chief=False, recovery_wait_secs=7200)  # told, not polled
            with sv.managed_session(target):
                joined.set()

    in_init_fn = threading.Event()
    go = threading.Event()

    def init_fn(sess: rt.Session) -> None:
        in_init_fn.set()
        assert go.wait(60)

    waiting = threading.Thread(target=other)
    waiting.start()
    sv = harness.Supervisor(init_fn=init_fn, saver=None)

    def release() -> None:
        assert in_init_fn.wait(60)
        assert not joined.is_set()  # the variables have values, the chief is not through
        go.set()

    releasing = threading.Thread(target=release)
    releasing.start()
    with sv.managed_session(target):
        assert joined.wait(60)
    waiting.join()
    releasing.join()


def test_wait_for_chief_has_limit(target: str) -> None:
    """The wait for the chief ends at its limit with what is missing."""
    counting()
    sv = harness.Supervisor(is_chief=False, recovery_wait_secs=7200)
    began = time.monotonic()
    with pytest.raises(
        rt.DeadlineExceededError, match="not ready after waiting .* not yet initialised global_step"
    ):
        sv.prepare_or_wait_for_session(target, max_wait_secs=0.3)
    assert time.monotonic() - began >= 0.3


def test_second_session_waits_too(target: str) -> None:
    """A second session of one Supervisor waits for the chief too."""
    counting()
    sv = harness.Supervisor(is_chief=False)
    with rt.Session(target) as chief:
        chief.run(sv.init_op)
        with sv.managed_session(target):
            pass
        rt.Session.reset(target)
    init = threading.Timer(0.2, lambda: rt.Session(target, sv.global_step.graph).run(sv.init_op))
    init.start()
    with sv.managed_session(target) as sess:
        assert not sv.should_stop()
        assert sess.run(sv.global_step) == 0
    init.join()


def test_own_ready_op_is_polled(target: str) -> None:
    """A ready_op of the user's own is run again until the model is ready."""
    counting()
    extra = rt.Variable(1.0, name="extra", collections=["mine"])
    ready = rt.report_uninitialized_variables([extra])
    manager = harness.SessionManager(ready_op=ready, recovery_wait_secs=0.02)
    with rt.Session(target) as chief:
        chief.run(rt.global_variables_initializer())
        with pytest.raises(rt.DeadlineExceededError, match="Variables not initialized: extra"):
            manager.wait_for_session(target, max_wait_secs=0.1)
        later = threading.Timer(0.1, lambda: chief.run(extra.initializer))
        later.start()
        manager.wait_for_session(target, max_wait_secs=10).close()
        later.join()


# -- services ----------------------------------------------------------------------------------------------------


def test_supervisor_saves_start_and_end(tmp_path: pathlib.Path) -> None:
    """A Supervisor saves at the start and at the end."""
    _, more = counting()
    sv = harness.Supervisor(logdir=tmp_path, save_model_secs=1000)
    with sv.managed_session() as sess:
        until(lambda: latest_checkpoint(str(tmp_path)))
        for _ in range(10):
            sess.run(more)
    steps = sorted(int(p.name) for p in (tmp_path / "model.ckpt").iterdir() if p.name.isdigit())
    assert steps == [0, 10]  # the classic Supervisor loses the last ten


def test_event_file_tells_the_run(tmp_path: pathlib.Path) -> None:
    """The event file holds the marks, rates, summaries and graph of the run."""
    step, more = counting()
    harness.summary.scalar("double", rt.numpy.astype(step, np.float32) * 2.0)
    sv = harness.Supervisor(logdir=tmp_path, save_model_secs=0, save_summaries_secs=0.05)
    with sv.managed_session() as sess:
        sess.run(more)
        until(lambda: any(v.tag == "global_step/sec" for v in values(sv, tmp_path)))
    assert marks(tmp_path)[0] == ("START", 0)
    assert marks(tmp_path)[1:] == [("CHECKPOINT", 1), ("STOP", 0)]
    assert {v.simple_value for v in values(sv, tmp_path) if v.tag == "double"} <= {0.0, 2.0}
    assert any(e.graph_def for e in events(tmp_path))


def values(sv: harness.Supervisor, logdir: pathlib.Path) -> list[Any]:
    if sv.summary_writer is not None and not sv.should_stop():
        sv.summary_writer.flush()
    return [v for e in events(logdir) for v in e.summary.value]


def test_fed_summary_does_not_end_run(tmp_path: pathlib.Path) -> None:
    """A summary that needs a feed does not end the run, and summary_computed writes its value."""
    x = rt.placeholder(np.float32, [], name="x")
    _, more = counting()
    op = harness.summary.scalar("x", x)
    sv = harness.Supervisor(logdir=tmp_path, save_model_secs=0, save_summaries_secs=0.02)
    with sv.managed_session() as sess:
        for _ in range(20):
            sess.run(more)
        assert not sv.should_stop()
        sv.summary_computed(sess, sess.run(op, {x: 3.0}))
    assert [v.simple_value for v in values(sv, tmp_path) if v.tag == "x"] == [3.0]


def test_summary_computed_needs_a_writer() -> None:
    """summary_computed needs a summary writer."""
    counting()
    sv = harness.Supervisor(saver=None)
    with sv.managed_session() as sess:
        with pytest.raises(RuntimeError, match="requires a summary writer"):
            sv.summary_computed(sess, b"")


def test_services_can_be_left_out(tmp_path: pathlib.Path) -> None:
    """Without the standard services no checkpoint is saved."""
    counting()
    sv = harness.Supervisor(logdir=tmp_path, save_model_secs=0.01)
    with sv.managed_session(start_standard_services=False):
        pass
    assert latest_checkpoint(str(tmp_path)) is None
    assert marks(tmp_path) == [("STOP", 0)]


def test_failing_service_shows_in_loop() -> None:
    """The error of a failing service is raised by the next step."""
    _, more = counting()
    sv = harness.Supervisor(saver=None)

    def broken() -> None:
        raise OSError("disk full")

    inside = None
    with pytest.raises(OSError, match="disk full") as caught:
        with sv.managed_session() as sess:
            sv.loop(None, broken)
            try:
                while True:  # a loop that never asks should_stop()
                    sess.run(more)
            except OSError as error:
                inside = error
                raise
    assert inside is caught.value  # from the step already, not only from the end of the block
    assert caught.traceback[-1].name == "broken"


# -- the end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [RuntimeError, rt.InvalidArgumentError, StopIteration, KeyboardInterrupt, SystemExit]
)
def test_block_error_is_raised(error: type[BaseException]) -> None:
    """An error of the block is raised, and the Supervisor stops."""
    counting()
    sv = harness.Supervisor(saver=None)
    # StopIteration cannot leave a generator as itself
    with pytest.raises((error, RuntimeError)) as caught:
        with sv.managed_session():
            raise error("x")
    assert "x" in str(caught.value) or "StopIteration" in str(caught.value)
    assert sv.should_stop()


def test_end_of_input_is_clean(tmp_path: pathlib.Path) -> None:
    """The end of the input is a clean end that saves."""
    _, more = counting()
    sv = harness.Supervisor(logdir=tmp_path, save_model_secs=1000)
    with sv.managed_session() as sess:
        sess.run(more)
        raise rt.OutOfRangeError("no more data")
    assert sv.should_stop()
    assert str(latest_checkpoint(str(tmp_path))).endswith("/1")


def test_ctrl_c_saves_the_step(tmp_path: pathlib.Path) -> None:
    """Ctrl-C saves the step that was reached."""
    _, more = counting()
    sv = harness.Supervisor(logdir=tmp_path, save_model_secs=1000)
    with pytest.raises(KeyboardInterrupt):
        with sv.managed_session() as sess:
            sess.run(more)
            raise KeyboardInterrupt
    assert str(latest_checkpoint(str(tmp_path))).endswith("/1")


def test_error_saves_no_further_step(tmp_path: pathlib.Path) -> None:
    """An error saves no further checkpoint."""
    _, more = counting()
    sv = harness.Supervisor(logdir=tmp_path, save_model_secs=1000)
    with pytest.raises(ValueError):
        with sv.managed_session() as sess:
            until(lambda: latest_checkpoint(str(tmp_path)))
            sess.run(more)
            raise ValueError
    assert str(latest_checkpoint(str(tmp_path))).endswith("/0")


def test_loop_runs_until_stop() -> None:
    """A loop of the Supervisor runs until the stop."""
    counting()
    sv = harness.Supervisor(saver=None)
    runs = threading.Semaphore(0)
    with sv.managed_session():
        thread = sv.loop(0.001, runs.release)
        for _ in range(3):
            assert runs.acquire(timeout=60)
        sv.request_stop()
        thread.join(60)
        assert not thread.is_alive()


def test_stop_by_hand_raises_errors(target: str) -> None:
    """stop raises the error of stop_on_exception and closes no session."""
    _, more = counting()
    sv = harness.Supervisor(saver=None)
    sess = sv.prepare_or_wait_for_session(target)
    with sv.stop_on_exception():
        raise ValueError("later")
    assert sv.should_stop()
    with pytest.raises(ValueError, match="later"):
        sv.stop()
    assert sess.raw.run(more) == 1  # stop() closes no session
    sess.close()


def test_supervisor_names_stragglers() -> None:
    """stop names the threads that still run, unless they are to be ignored."""
    counting()
    sv = harness.Supervisor(saver=None, stop_grace_secs=0.1)
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="straggler")
    thread.start()
    sess = sv.prepare_or_wait_for_session("")
    with pytest.raises(RuntimeError, match="straggler"):
        sv.stop([thread])
    sv.stop([thread], ignore_live_threads=True)
    release.set()
    thread.join()
    sess.close()


def test_writer_is_closed_and_reopened(tmp_path: pathlib.Path) -> None:
    """The summary writer is closed at the end and opened again by the next session."""
    counting()
    sv = harness.Supervisor(logdir=tmp_path, save_model_secs=0)
    with sv.managed_session(close_summary_writer=False):
        pass
    with sv.managed_session():
        pass
    assert sum(bool(e.graph_def) for e in events(tmp_path)) == 1
    with sv.managed_session():
        pass
    assert [name for name, _ in marks(tmp_path)].count("STOP") == 2
