"""A managed session is a session to whoever is given one, and what a saver or a hook offers is told by its type."""

from collections.abc import Iterator

import pytest

import runtime as rt
from harness import (
    ManagedSession,
    SessionManager,
    Supervisor,
)
from harness.coordinator import underlying
from tests.kit.losses import loss_of
from tests.runtime.kit import TARGET, servers


@pytest.fixture
def session(graph: rt.Graph) -> Iterator[ManagedSession]:
    rt.Variable(1.0, name="v")
    with Supervisor().managed_session() as managed:
        yield managed


@pytest.fixture
def graph() -> Iterator[rt.Graph]:
    with rt.Graph().as_default() as made:
        yield made


def test_managed_session_mirrors_raw_session(session: ManagedSession) -> None:
    """A managed session answers as the session underneath."""
    raw = session.raw
    (variable,) = rt.global_variables()
    assert (
        not isinstance(session, rt.Session)
        and underlying(session) is raw
        and underlying(raw) is raw
    )
    assert isinstance(session, rt.SessionLike) and isinstance(raw, rt.SessionLike)
    assert not isinstance(variable, rt.SessionLike)
    for name in (name for name in vars(rt.Session) if not name.startswith("_")):
        assert hasattr(session, name), name
    for name in (
        "value_ids",
        "task",
        "id",
        "silent_secs",
        "left_tasks",
        "authority",
        "checkpoint_coordinator",
        "graph",
        "config",
        "target",
    ):
        assert getattr(session, name) == getattr(raw, name), name
    assert session.list_devices() == raw.list_devices()
    assert session.placement([variable]) == raw.placement([variable])


def test_recovery_replaces_raw_session(session: ManagedSession) -> None:
    """After a recovery a managed session answers as the new session."""
    before = session.raw
    session.recover(before, loss_of(before, rt.AbortedError("a task was lost")))
    assert session.raw is not before and underlying(session) is session.raw
    assert session.id == session.raw.id
    with pytest.raises(RuntimeError, match="closed"):
        before.run("v:0")


def test_managed_session_can_be_default(session: ManagedSession) -> None:
    """A managed session can be the default session and makes callables."""
    (variable,) = rt.global_variables()
    with session.as_default():
        assert rt.get_default_session() is session
        assert variable.eval() == 1.0
    assert session.make_callable(variable)() == 1.0


def test_block_sets_the_defaults_once() -> None:
    """The block of a managed session sets session and graph as defaults, and cannot be nested."""
    graph = rt.Graph()
    with graph.as_default():
        variable = rt.Variable(2.0, name="v")
    with Supervisor(graph=graph).prepare_or_wait_for_session() as session:
        assert rt.get_default_session() is session and rt.get_default_graph() is graph
        assert variable.eval() == 2.0
        with pytest.raises(RuntimeError, match="not re-entrant"), session:
            pass
    assert rt.get_default_session() is None and rt.get_default_graph() is not graph
    assert session.closed


def test_managed_session_has_no_other_names(session: ManagedSession) -> None:
    """A managed session has neither unknown names nor private state of the session."""
    with pytest.raises(AttributeError):
        _ = session.no_such_name
    with pytest.raises(AttributeError):
        _ = session._engine  # a session's own state is not reached through it


def test_leaving_ps_ends_recovery(graph: rt.Graph, caplog: pytest.LogCaptureFixture) -> None:
    """A ps that leaves ends a recovery and a start at once."""
    with servers(sockets=True, ps=1, worker=1) as made:
        with rt.device("/job:ps/task:0"):
            v = rt.Variable(1.0, name="v")
        target = made[TARGET].target
        SessionManager().prepare_session(target, v.initializer).close()
        worker = Supervisor(graph=graph, is_chief=False)
        with worker.managed_session(target) as session:
            run = made["/job:ps/task:0"].worker.store.run
            # it still answers, for as long as it stops
            run.close(rt.TaskLeftError("it has left: training is over"))
            with pytest.raises(
                rt.TaskLeftError, match="/job:ps/task:0: it has left: training is over"
            ):
                session.recover(session.raw, loss_of(session))
            assert session.left is not None
        assert (
            "training is over; what was done here since the last checkpoint is not saved"
            in caplog.text
        )
        with pytest.raises(rt.TaskLeftError, match="/job:ps/task:0: it has left: training is over"):
            Supervisor(graph=graph, is_chief=False).prepare_or_wait_for_session(target)
