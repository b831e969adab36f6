"""The table of limits: values that can be none, where they are given, and what an error says of them."""

import math
import pathlib
import re

import pytest
from absl import flags
from absl.testing import flagsaver

import runtime as rt
from models.mnist.config import RunConfig
from runtime.limits import LimitRow
from runtime.retired import explain_flags
from tests.kit.changes import SetVariables

GUIDE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "limits.md"
ROWS = rt.Limits.rows()


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_bad_limit_is_refused_by_name(row: LimitRow) -> None:
    """A value that cannot be a limit is refused with the limit's name, and 1 is allowed."""
    bad = [0, -1, True, "5", math.nan, math.inf if row.kind is int else None]
    if not math.isinf(row.most):
        bad.append(row.kind(row.most) + 1)
    for value in bad:
        with pytest.raises(rt.InvalidArgumentError, match=f"the limit {row.name} is"):
            rt.Limits(**{row.name: value})
    assert getattr(rt.Limits(**{row.name: 1}), row.name) == 1


def test_environment_gives_limits() -> None:
    """BELLWETHER_LIMITS gives limits by name, and the others keep their defaults."""
    assert rt.Limits.from_environ({}) == rt.Limits()
    given = rt.Limits.from_environ({"BELLWETHER_LIMITS": " connections=100, hello_secs=0.5,"})
    assert given == rt.Limits(connections=100, hello_secs=0.5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("conections=5", "no limit 'conections'; there are connections, "),
        ("connections", "'connections' gives no number"),
        ("connections=many", "'connections=many' gives no number"),
        ("connections=1.5", "'connections=1.5' gives no number"),
        ("held_bytes=5", "Limits(held_bytes=) is gone: since 0.2 use task_bytes"),
        ("connections=0", "the limit connections is 0, not a whole number above 0"),
        ("hello_secs=1000", "the limit hello_secs is 1000.0, not a number above 0 and at most 600"),
    ],
)
def test_bad_environment_is_one_line(text: str, says: str, set_variables: SetVariables) -> None:
    """A server explains a bad BELLWETHER_LIMITS in one line."""
    set_variables(BELLWETHER_LIMITS=text)
    with pytest.raises(rt.InvalidArgumentError, match=re.escape(says)):
        rt.Server({"local": ["localhost:0"]}, "local", 0)


def test_connections_leave_files_to_others() -> None:
    """The limits of connections shrink with the limit of files, unless they are given."""
    few = rt.Limits().within(1024)
    assert (few.connections, few.rpc_connections) == (640, 160)
    assert rt.Limits().within(1 << 20) == rt.Limits()
    assert rt.Limits(connections=7).within(1024).connections == 7


def test_error_tells_how_to_change_limit() -> None:
    """An error of a limit has its name, value and the three ways to change the limit."""
    error = rt.Limits(sessions=3).exceeded("sessions", "3 sessions are open", "/job:ps/task:0")
    assert error.limit == "sessions" and error.task == "/job:ps/task:0"
    for part in (
        "3 sessions are open",
        "limit sessions is 3",
        "--limit_sessions",
        "limits=",
        "BELLWETHER_LIMITS",
    ):
        assert part in error.message


def test_each_limit_is_a_flag(
    set_variables: SetVariables,
) -> None:
    """Each limit is a flag of the trainer that says its default."""
    set_variables(BELLWETHER_LIMITS=None)
    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()
        assert RunConfig.from_flags().limits is None
        for row in ROWS:
            flag = flags.FLAGS[f"limit_{row.name}"]
            assert flag.help == f"Limit ({row.of}): {row.help} Default: {row.default}."
            with flagsaver.flagsaver():
                value = int(min(7, row.most))
                flag.parse(str(value))
                assert RunConfig.from_flags().limits == rt.Limits(**{row.name: value})
                flag.parse("0")
                with pytest.raises(rt.InvalidArgumentError, match=f"the limit {row.name} is 0"):
                    RunConfig.from_flags()


def test_flag_precedes_environment(set_variables: SetVariables) -> None:
    """A limit's flag precedes the limit in the environment."""
    set_variables(BELLWETHER_LIMITS="sessions=3,connections=4")
    with flagsaver.flagsaver(limit_sessions=5):
        flags.FLAGS.mark_as_parsed()
        assert RunConfig.from_flags().limits == rt.Limits(sessions=5, connections=4)


def table() -> str:
    """The table of limits as docs/limits.md has it."""
    lines = ["| limit | default | of | what |", "|---|---:|---|---|"]
    lines += [f"| `{row.name}` | {row.default} | {row.of} | {row.help} |" for row in ROWS]
    return "\n".join(lines) + "\n"


def test_guide_has_all_limits() -> None:
    """docs/limits.md has the table of all limits with their defaults."""
    assert table() in GUIDE.read_text(), f"docs/limits.md should have\n{table()}"


def test_retired_limits_are_explained() -> None:
    """There are at most 15 limits, and a retired name says what to use."""
    assert len(ROWS) <= 15
    with pytest.raises(
        rt.InvalidArgumentError, match="frame_rate=. is gone: since 0.2 this is a constant"
    ):
        rt.Limits(frame_rate=5)
    assert explain_flags(["--limit_client_held_bytes=5"]) == (
        "--limit_client_held_bytes is gone: since 0.2 use client_bytes (docs/limits.md)"
    )
