"""Errors whose message says all come with the frames of the user's program alone."""

import pathlib
import textwrap

import pytest

import runtime as rt
from harness import exit_codes
from harness.launch.ports import free_ports
from harness.training.stop import tracebacks
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
            program.expect(
                "frames of harness and runtime are left out: BELLWETHER_TRACEBACK=full shows them"
            )
            assert len(program.lines("Traceback")) == 1


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
