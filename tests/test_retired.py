"""Names that are gone: each row of the table ends what it was given to with one line that says what to use instead."""

import os
import subprocess
import sys

import optax
import pytest

import harness
import runtime as rt
from harness import exit_codes
from harness.command_line import ToolParser
from runtime import retired
from runtime.retired import REPLACEMENTS, explain_flags
from tests.kit.changes import SetVariables

pytestmark = pytest.mark.cluster

FLAGS = [name for name in REPLACEMENTS if name.startswith("--")]
VARIABLES = [name for name in REPLACEMENTS if name.startswith("BELLWETHER_")]
ARGUMENTS = [name for name in REPLACEMENTS if name.endswith("=)")]
PUBLIC = [name for name in REPLACEMENTS if name.startswith(("harness.", "runtime."))]
OF_SESSIONS = [name for name in REPLACEMENTS if name.startswith("ManagedSession.")]
METHODS = [name for name in REPLACEMENTS if name.startswith("SyncReplicas.")]
PROGRAMS = {"--for": "harness.manifests.__main__", "--color": "harness.launch.__main__"}
"""Modules that had a flag, by the flag; the others were the trainer's."""
SCRIPT = """
import importlib, sys
from harness import exit_codes
importlib.import_module(sys.argv[1])
for name in sys.argv[2:]:
    try:
        exit_codes.parse_flags(["program", name if "=" in name else name + "=1"])
        print("taken")
    except SystemExit as ended:
        print(ended.code, file=sys.stderr)
"""


def test_retired_rows_say_since_when() -> None:
    """Every row of the table is tested here and says since when."""
    named = FLAGS + VARIABLES + ARGUMENTS + PUBLIC + METHODS + OF_SESSIONS
    assert set(named) == set(REPLACEMENTS)
    # The package keeps the bare names, since the table is in the runtime, which it loads late.
    assert {f"harness.{name}" for name in harness._RETIRED} == {
        n for n in PUBLIC if n.startswith("harness.")
    }
    for name, line in REPLACEMENTS.items():
        assert line.startswith("since 0.") and "\n" not in line, name


@pytest.mark.parametrize("program", ["models.mnist.trainer", *PROGRAMS.values()])
def test_retired_flag_ends_the_program(program: str) -> None:
    """A retired flag ends a program with one line."""
    names = [
        name
        for name in FLAGS
        if PROGRAMS.get(name.partition("=")[0], "models.mnist.trainer") == program
    ]
    command = [sys.executable, "-c", SCRIPT, program, *names]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = told.stderr.splitlines()
    assert told.stdout == "" and lines[1::2] == ["2"] * len(names)
    for name, line in zip(names, lines[::2], strict=True):
        assert f"{name} is gone: since 0." in line


@pytest.mark.parametrize("program", ["harness.launch", "harness.manifests"])
def test_retired_flag_ends_a_command(program: str) -> None:
    """A retired value of a flag ends a command with one line."""
    flag = {"harness.launch": "--exit_codes", "harness.manifests": "--for"}[program]
    command = [sys.executable, "-m", program, flag, "skypilot", "--", "true"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == exit_codes.CONFIGURATION.plain
    assert f"{flag}=skypilot is gone: since 0.2" in told.stderr and told.stderr.count("\n") == 1


def test_retired_flag_ends_a_tool(capsys: pytest.CaptureFixture[str]) -> None:
    """A retired flag ends a tool with one line."""
    with pytest.raises(SystemExit) as ended:
        ToolParser("harness.some", "Some tool.").parse_args([FLAGS[0]])
    assert ended.value.code == exit_codes.CONFIGURATION.plain
    assert f"{FLAGS[0]} is gone: since 0." in capsys.readouterr().err


def test_flags_end_at_two_dashes() -> None:
    """Retired flags are looked for before two dashes only."""
    assert explain_flags(["--ps=1", "-for", "skypilot"]) == explain_flags(["--for=skypilot"])
    assert explain_flags(["--ps=1", "--", "--for=skypilot"]) is None
    assert explain_flags(["--for=jobset", "for=skypilot", "--form=skypilot"]) is None


@pytest.mark.parametrize("name", VARIABLES)
def test_retired_variable_ends_a_server(set_variables: SetVariables, name: str) -> None:
    """A retired environment variable ends a Server."""
    set_variables({name: "1"})
    with pytest.raises(rt.InvalidArgumentError, match=f"^{name} is gone: since 0."):
        rt.Server({"worker": ["localhost:0"]}, "worker", 0)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_retired_argument_is_refused(name: str) -> None:
    """A retired argument is refused with its replacement."""
    owner, argument = name.removesuffix("=)").split("(")
    cluster = [{"worker": ["localhost:0"]}, "worker", 0] if owner == "Server" else []
    with pytest.raises(rt.InvalidArgumentError) as refused:
        getattr(rt if hasattr(rt, owner) else harness, owner)(*cluster, **{argument: None})
    assert f"{name} is gone: since 0." in str(refused.value)


@pytest.mark.parametrize("name", PUBLIC)
def test_retired_public_name_is_explained(name: str) -> None:
    """An import of a name that is gone fails with the line about the name."""
    with pytest.raises(ImportError, match=f"^{name} is gone: since 0."):
        exec("from {} import {}".format(*name.split(".")), {})


@pytest.mark.parametrize("name", METHODS)
def test_retired_method_is_explained(name: str) -> None:
    """A method that is gone is an attribute error with the line about the method."""
    sync = harness.SyncReplicas(harness.Optimizer(optax.sgd(0.1)), 1)
    with pytest.raises(AttributeError, match=f"^{name} is gone: since 0."):
        getattr(sync, name.removeprefix("SyncReplicas."))
    with pytest.raises(AttributeError, match="'SyncReplicas' object has no attribute 'nothing'"):
        sync.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_retired_variable_ends_launched_task() -> None:
    """A retired variable ends a launched task for good."""
    name = (VARIABLES or [""])[0]
    if not name:
        pytest.skip("no variable is gone")
    trainer = [sys.executable, "-m", "models.mnist.trainer", "--logdir="]
    command = [sys.executable, "-m", "harness.launch", "--ps=1", "--workers=1", "--", *trainer]
    told = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, name: "1"}
    )
    assert told.returncode == exit_codes.CONFIGURATION.plain
    assert f"{name} is gone: since 0." in told.stdout + told.stderr


def test_unknown_argument_stays_type_error() -> None:
    """An unknown argument is still Python's TypeError."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        rt.Server({"worker": ["localhost:0"]}, nothing=1)  # type: ignore[call-arg]
    assert retired.explain_name("--nothing") is None


def test_retired_session_method_is_explained() -> None:
    """A retired method of a managed session is explained."""
    with rt.Graph().as_default(), harness.Supervisor().managed_session() as session:
        for name in ("last_step", "note", "reached"):
            with pytest.raises(AttributeError, match=f"^ManagedSession.{name} is gone: since 0.2"):
                getattr(session, name)
        assert session.seen.last is None
