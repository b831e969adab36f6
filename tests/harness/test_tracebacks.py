"""Errors whose message says all come with the frames of the user's program alone."""

import pathlib
import textwrap

import pytest

import runtime as rt
from harness import exit_codes, tracebacks
from tests.kit.ports import free_ports
from tests.kit.processes import Program

OPENS = """
    import harness
    import runtime as rt

    with harness.join_cluster() as me:
        supervisor = harness.Supervisor(is_chief=me.is_chief)
        with supervisor.managed_session(me.target, config=rt.SessionConfig(start_timeout_secs=0.5)):
            pass
"""


@pytest.mark.cluster
@pytest.mark.parametrize("full", [False, True])
def test_unopened_session_has_short_traceback(full: bool, tmp_path: pathlib.Path) -> None:
    """The traceback of a session that does not open shows the user's frames only, unless the
    variable asks for all.
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(OPENS))
    hosts = [
        f"--{job}_hosts=localhost:{port}"
        for job, port in zip(("ps", "worker"), free_ports(2), strict=True)
    ]
    env = {tracebacks.VARIABLE: "full"} if full else {}
    with Program(
        "python", "train.py", *hosts, "--job_name=worker", cwd=tmp_path, env=env
    ) as program:
        assert program.wait() == exit_codes.LOST.plain, program.story()
        assert bool(program.lines(r"session_manager\.py.*line")) == full
        if not full:
            program.expect("^Traceback")
            program.expect(r'File ".*train\.py", line 7')
            program.expect("managed_session")
            program.expect(
                "^runtime.errors.DeadlineExceededError: .*connection refused: nobody listens there"
            )
            program.expect("frames of libraries are left out: BELLWETHER_TRACEBACK=full shows them")
            assert len(program.lines("Traceback")) == 1


MISTAKE = """
    import harness
    import runtime as rt

    with harness.join_cluster() as me:
        x = rt.placeholder("float32", [], name="x")
        with harness.Supervisor().managed_session(me.target) as session:
            session.run({step})
"""


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("x * 2", "RuntimeError: .*'mul' was not added; make all operations before"),
        ("x, {'y:0': 1.0}", "TypeError: Cannot interpret feed_dict key .*the placeholders are x$"),
        ("x, {x: 'two'}", "the value fed for 'x:0' is not numeric"),
        ("x, {x: [][0]}", "^IndexError: list index out of range"),
    ],
)
def test_mistake_has_only_own_frames(step: str, said: str, tmp_path: pathlib.Path) -> None:
    """The traceback of any error is the lines of the program, then the message."""
    (tmp_path / "train.py").write_text(textwrap.dedent(MISTAKE.replace("{step}", step)))
    with Program("python", "train.py", cwd=tmp_path) as program:
        assert program.wait() != 0
        program.expect(said)
        # The process that tests fork programs from is no library.
        files = program.lines(r'^ *File "(?!<string>|<frozen|.*zygote\.py)')
        assert files and all('train.py"' in f for f in files), program.story()


ALONE = """
    import json
    import harness
    import runtime as rt

    x = rt.placeholder("float32", [2], name="x")
    with rt.Server.create_local_server() as server, rt.Session(server.target) as session:
        {act}
"""


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("act", "others"), [("session.run(x, {x: [1.0]})", False), ("json.loads('')", True)]
)
def test_each_program_has_short_tracebacks(act: str, others: bool, tmp_path: pathlib.Path) -> None:
    """An error of this library loses its frames without ``join_cluster`` too; any other error keeps all."""
    (tmp_path / "train.py").write_text(textwrap.dedent(ALONE.replace("{act}", act)))
    with Program("python", "train.py", cwd=tmp_path) as program:
        assert program.wait() == 1
        program.expect(r'File ".*train\.py", line 8')
        assert bool(program.lines(r'File ".*(runtime|json)/')) == others, program.story()
        assert bool(program.lines("frames of libraries are left out")) != others


def test_installed_program_keeps_its_frames() -> None:
    """A program all of whose frames are those of a library has them all."""
    with pytest.raises(rt.InvalidArgumentError) as caught:
        rt.ClusterSpec({"ps": ["a:1"]}).task_address("ps", 7)
    assert caught.value.__traceback__ is not None
    caught.value.__traceback__ = caught.value.__traceback__.tb_next
    assert "spec.py" in tracebacks.short(caught.value)


def test_programs_own_cause_is_shown() -> None:
    """The cause of an error is shown where the program had a part in it."""

    def wrong() -> None:
        raise ValueError("the program's own")

    with pytest.raises(rt.UnavailableError) as caught:
        try:
            wrong()
        except ValueError as error:
            raise rt.UnavailableError("lost") from error
    told = tracebacks.short(caught.value)
    assert "in wrong" in told and told.index("the program's own") < told.index(
        "UnavailableError: lost"
    )
    with pytest.raises(rt.InvalidArgumentError) as caught_here:
        rt.ClusterSpec({"ps": ["a:1"]}).task_address("ps", 7)
    assert "spec.py" not in tracebacks.short(caught_here.value)
