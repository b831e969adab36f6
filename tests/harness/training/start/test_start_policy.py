"""The decisions as a table: what the cluster reports, and what follows from it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.training.start.policy import ClusterReport, StartAction, StartOptions, TaskRole, decide

NOW = 100.0
SOON = StartOptions(give_up_at=200.0)
LATE = StartOptions(give_up_at=100.0)
PS0, PS1 = "/job:ps/task:0", "/job:ps/task:1"


def report(**changes: Any) -> ClusterReport:
    return ClusterReport(**{"variables": 3, **changes})


CHIEF = [
    # what, report, options, action, words of the reason
    (
        "a fresh cluster",
        report(missing=["a", "b"], phases={PS0: "new"}),
        SOON,
        StartAction.INITIALIZE,
        "no checkpoint",
    ),
    (
        "a fresh cluster, a checkpoint",
        report(missing=["a"], checkpoint="/d/7"),
        SOON,
        StartAction.RESTORE,
        "/d/7",
    ),
    (
        "the model is alive",
        report(phases={PS0: "ready", PS1: "ready"}),
        SOON,
        StartAction.KEEP,
        "no step is lost",
    ),
    (
        "alive, a checkpoint too",
        report(phases={PS0: "ready"}, checkpoint="/d/7"),
        SOON,
        StartAction.KEEP,
        "no step is lost",
    ),
    ("initialised by somebody else", report(phases={PS0: "new"}), SOON, StartAction.KEEP, "alive"),
    ("alive after its end", report(phases={PS0: "finished"}), SOON, StartAction.KEEP, "alive"),
    (
        "started again after its end",
        report(phases={PS0: "finished", PS1: "ready"}),
        StartOptions(200.0, started_again=True),
        StartAction.END,
        "the run has finished before this task was started again",
    ),
    (
        "started again, and training goes on",
        report(phases={PS0: "ready"}),
        StartOptions(200.0, started_again=True),
        StartAction.KEEP,
        "alive",
    ),
    (
        "one ps lost its memory",
        report(missing=["b"], phases={PS0: "ready", PS1: "new"}, checkpoint="/d/7"),
        SOON,
        StartAction.RESTORE,
        "no value on its task: b",
    ),
    (
        "one ps lost its memory, and had no backup",
        report(
            missing=["b"],
            phases={PS0: "ready", PS1: "new"},
            origins=["ps 1 has no backup"],
            checkpoint="/d/7",
        ),
        SOON,
        StartAction.RESTORE,
        "ps 1 has no backup",
    ),
    (
        "the chief died while it restored",
        report(phases={PS0: "loading", PS1: "ready"}, checkpoint="/d/7"),
        SOON,
        StartAction.RESTORE,
        "died while",
    ),
    (
        "the chief died while it initialised",
        report(phases={PS0: "loading"}),
        SOON,
        StartAction.INITIALIZE,
        "died while",
    ),
    (
        "lost, no checkpoint",
        report(missing=["a"]),
        StartOptions(200.0, recovering=True),
        StartAction.INITIALIZE,
        "ALL STEPS SO FAR ARE LOST",
    ),
    (
        "nothing to initialise with",
        report(missing=["a"]),
        StartOptions(200.0, can_initialize=False),
        StartAction.GIVE_UP,
        "no init_op or init_fn",
    ),
    (
        "waiting for a checkpoint",
        report(missing=["a"]),
        StartOptions(200.0, wait_for_checkpoint=True),
        StartAction.WAIT,
        "waiting for a checkpoint",
    ),
    (
        "waited long enough for it",
        report(missing=["a"]),
        StartOptions(100.0, wait_for_checkpoint=True),
        StartAction.INITIALIZE,
        "no checkpoint",
    ),
    (
        "no variables at all, first time",
        ClusterReport(phases={PS0: "new"}),
        SOON,
        StartAction.INITIALIZE,
        "nothing tells",
    ),
    (
        "no variables, but opened before",
        ClusterReport(phases={PS0: "ready"}),
        SOON,
        StartAction.KEEP,
        "alive",
    ),
]
OTHER = [
    (
        "not initialised",
        report(missing=["a"], phases={PS0: "new"}),
        SOON,
        StartAction.WAIT,
        "not yet initialised a",
    ),
    (
        "not initialised, and nobody leads",
        report(missing=["a"], phases={PS0: "new", PS1: "new"}, addresses={PS0: "h:1"}),
        SOON,
        StartAction.WAIT,
        f"no chief has come to {PS0} at h:1, {PS1} yet",
    ),
    (
        "not initialised by the one who leads",
        report(missing=["a"], phases={PS0: "ready"}, chief="/job:worker/task:0 at h:2"),
        SOON,
        StartAction.WAIT,
        "waiting for /job:worker/task:0 at h:2",
    ),
    (
        "the chief is not through, and it is said who that is",
        report(phases={PS0: "loading"}, chief="/job:worker/task:0 at h:2"),
        SOON,
        StartAction.WAIT,
        "waiting for /job:worker/task:0 at h:2",
    ),
    (
        "not initialised in time",
        report(missing=["a"]),
        LATE,
        StartAction.GIVE_UP,
        "not yet initialised a",
    ),
    (
        "values, but the chief is not through",
        report(phases={PS0: "loading"}),
        SOON,
        StartAction.WAIT,
        "still giving",
    ),
    (
        "one ps of two restored",
        report(phases={PS0: "ready", PS1: "loading"}),
        SOON,
        StartAction.WAIT,
        PS1,
    ),
    ("ready", report(phases={PS0: "ready", PS1: "ready"}), SOON, StartAction.JOIN, "ready"),
    ("ready, time is up", report(phases={PS0: "ready"}), LATE, StartAction.JOIN, "ready"),
    (
        "initialised without a supervisor",
        report(phases={PS0: "new"}),
        SOON,
        StartAction.JOIN,
        "ready",
    ),
    ("training is over", report(phases={PS0: "finished"}), SOON, StartAction.END, "finished"),
    (
        "over, and a ps has left its values",
        report(missing=["a"], phases={PS0: "finished"}),
        SOON,
        StartAction.END,
        "finished",
    ),
    (
        "a ready operation says no",
        report(phases={PS0: "ready"}, not_ready="x"),
        SOON,
        StartAction.WAIT,
        "x",
    ),
]


@pytest.mark.parametrize(
    ("report", "options", "action", "words"), [r[1:] for r in CHIEF], ids=[r[0] for r in CHIEF]
)
def test_chief_decides_by_report(
    report: ClusterReport, options: StartOptions, action: StartAction, words: str
) -> None:
    """The chief decides by the cluster's report and says why."""
    decision = decide(NOW, TaskRole.CHIEF, report, options)
    assert decision.action is action, decision
    assert words in decision.reason


@pytest.mark.parametrize(
    ("report", "options", "action", "words"), [r[1:] for r in OTHER], ids=[r[0] for r in OTHER]
)
def test_workers_decide_by_report(
    report: ClusterReport, options: StartOptions, action: StartAction, words: str
) -> None:
    """A worker decides by the cluster's report and says why."""
    decision = decide(NOW, TaskRole.OTHER, report, options)
    assert decision.action is action, decision
    assert words in decision.reason


PHASES = st.dictionaries(
    st.sampled_from([PS0, PS1]), st.sampled_from(["new", "loading", "ready", "finished"])
)
REPORTS = st.builds(
    ClusterReport,
    variables=st.integers(0, 3),
    missing=st.lists(st.sampled_from("abcdefgh"), unique=True),
    phases=PHASES,
    not_ready=st.sampled_from(["", "x"]),
    checkpoint=st.sampled_from([None, "/d/7"]),
)
OPTIONS = st.builds(StartOptions, st.floats(0, 200), st.booleans(), st.booleans(), st.booleans())


@given(REPORTS, OPTIONS)
def test_only_chief_initialises_dead_models(report: ClusterReport, options: StartOptions) -> None:
    """Only the chief gives values, and never over a live model."""
    other = decide(NOW, TaskRole.OTHER, report, options)
    assert other.action not in (StartAction.INITIALIZE, StartAction.RESTORE, StartAction.KEEP)
    chief = decide(NOW, TaskRole.CHIEF, report, options)
    assert chief.reason
    if chief.action in (StartAction.INITIALIZE, StartAction.RESTORE) and report.variables:
        assert report.missing or "loading" in report.phases.values()
    if chief.action is StartAction.RESTORE:
        assert report.checkpoint is not None
    if chief.action is StartAction.INITIALIZE:
        assert report.checkpoint is None


@given(REPORTS, OPTIONS)
def test_half_restored_model_is_not_joined(report: ClusterReport, options: StartOptions) -> None:
    """No worker joins a half-restored model."""
    if report.missing or "loading" in report.phases.values():
        assert decide(NOW, TaskRole.OTHER, report, options).action is not StartAction.JOIN


@given(REPORTS, OPTIONS, st.sampled_from(TaskRole))
def test_waiting_ends_at_the_limit(
    report: ClusterReport, options: StartOptions, role: TaskRole
) -> None:
    """No task waits beyond its limit."""
    assert decide(options.give_up_at, role, report, options).action is not StartAction.WAIT
