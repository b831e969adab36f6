"""Flags of a program that absl has for itself."""

import subprocess
import sys
import textwrap

import pytest

from tests.kit.processes import ROOT

pytestmark = pytest.mark.cluster


def _run(program: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_program_may_redefine_absl_flags() -> None:
    """A program may define a flag that absl has."""
    ended = _run(
        """
        import harness.tf1 as tf
        import harness.training.run.supervisor
        from absl import logging
        tf.app.flags.DEFINE_string("log_dir", "/tmp/mine", "where events go")
        tf.app.flags.DEFINE_enum("v", "b", ["a", "b"], "which")
        FLAGS = tf.app.flags.FLAGS
        def main(_):
            print(FLAGS.log_dir, FLAGS.v, FLAGS.alsologtostderr)
            logging.warning("logging works")
        tf.app.run()
        """,
        "--log_dir=/tmp/given",
    )
    assert (ended.returncode, ended.stdout) == (0, "/tmp/given b False\n"), ended.stderr
    assert "logging works" in ended.stderr


def test_help_shows_program_flags() -> None:
    """--help shows the flags of the program."""
    program = """
        import harness.tf1 as tf
        tf.app.flags.DEFINE_string("ps_hosts", "", "addresses of the ps")
        tf.app.run(lambda argv: None)
        """
    ended = _run(program, "--help")
    assert "--ps_hosts: addresses of the ps" in ended.stdout, ended.stdout + ended.stderr


def test_flag_defined_twice_is_refused() -> None:
    """A flag that the program defines twice is refused."""
    ended = _run(
        """
        import sys, types
        import harness.tf1 as tf
        tf.app.flags.DEFINE_string("log_dir", "", "mine")
        other = types.ModuleType("other")
        sys.modules["other"] = other
        exec("import harness.tf1 as tf\\ntf.app.flags.DEFINE_integer('log_dir', 1, 'theirs')", vars(other))
        """
    )
    assert (
        ended.returncode == 1
        and "DuplicateFlagError" in ended.stderr
        and "'log_dir'" in ended.stderr
    )


def test_unique_flag_prefix_is_enough() -> None:
    """The beginning of a flag's name is enough where no other flag begins so."""
    program = """
        import harness.tf1 as tf
        tf.app.flags.DEFINE_integer("task_index", -1, "which")
        tf.app.flags.DEFINE_string("ps_hosts", "", "addresses")
        tf.app.flags.DEFINE_string("ps_ports", "", "ports")
        FLAGS = tf.app.flags.FLAGS
        tf.app.run(lambda argv: print(FLAGS.task_index, FLAGS.ps_hosts, FLAGS.ps_ports, argv[1:]))
        """
    ended = _run(program, "--task=3", "--ps=both?", "--ps_h", "a:1", "--verb=2", "rest")
    assert (ended.returncode, ended.stdout) == (0, "3 a:1  ['--ps=both?', '--verb=2', 'rest']\n"), (
        ended.stderr
    )
