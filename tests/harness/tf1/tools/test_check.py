"""Which names of TensorFlow's a program uses, and which of them are here: ``python -m harness.tf1 --check``."""

import ast
import pathlib
import subprocess
import sys
import textwrap

import pytest

from harness.tf1.tools import check

ROOT = pathlib.Path(__file__).resolve().parents[4]


def found(source: str) -> dict[str, str]:
    """Name in full -> what is said of it, of a program's text."""
    return {use.name: use.missing for use in check.uses(ast.parse(textwrap.dedent(source)))}


def test_check_follows_every_import() -> None:
    """The check finds TensorFlow's names however they were imported."""
    names = found(
        """
        import tensorflow
        import tensorflow as tf
        import tensorflow.contrib.slim as slim
        import numpy as np
        from tensorflow.python.framework import ops
        from tensorflow.python.ops.array_ops import reshape, transpose as swap
        from tensorflow.contrib import layers
        from .tensorflow import mine

        flags = tf.app.flags
        define = flags
        define.DEFINE_integer("n", 1, "")
        tensorflow.constant(np.zeros(3)); mine.nothing(); np.tensorflow.nothing
        with slim.arg_scope([slim.conv2d]):
            layers.xavier_initializer(tf.float32.name)
        ops.Tensor, reshape, swap(tf.GraphKeys.LOSSES)
        """
    )
    assert names == dict.fromkeys(
        (
            "tensorflow.app.flags.DEFINE_integer",
            "tensorflow.constant",
            "tensorflow.contrib.layers.xavier_initializer",
            "tensorflow.contrib.slim.arg_scope",
            "tensorflow.contrib.slim.conv2d",
            "tensorflow.float32",
            "tensorflow.GraphKeys.LOSSES",
            "tensorflow.python.framework.ops.Tensor",
            "tensorflow.python.ops.array_ops.reshape",
            "tensorflow.python.ops.array_ops.transpose",
        ),
        "",
    )


def test_check_explains_missing_names() -> None:
    """The check explains a missing name as the program's run would."""
    names = found(
        """
        import tensorflow as tf
        from tensorflow.contrib.learn import DNNClassifier, Experiment
        from tensorflow.contrib.session_bundle import exporter

        DNNClassifier()
        exporter.Exporter(None)
        tf.moments, tf.no_such_thing, tf.GraphKeys.NO_SUCH_KEY, tf.gfile.NoSuchFile
        """
    )
    assert names == {
        "tensorflow.contrib.learn.DNNClassifier": "tf.contrib.learn.DNNClassifier is not in harness.tf1: "
        "tf.train.MonitoredTrainingSession, or harness.Supervisor",
        "tensorflow.contrib.session_bundle.exporter.Exporter": "tf.contrib.session_bundle.exporter.Exporter is not in "
        "harness.tf1: jax.export",
        "tensorflow.moments": "tensorflow.moments is not in harness.tf1, but tf.nn.moments is",
        "tensorflow.no_such_thing": "tf.no_such_thing is not in harness.tf1; docs/tf1_names.md lists what is",
        "tensorflow.GraphKeys.NO_SUCH_KEY": "tensorflow.GraphKeys.NO_SUCH_KEY is not in harness.tf1",
        "tensorflow.gfile.NoSuchFile": "tf.gfile.NoSuchFile is not in harness.tf1; docs/tf1_names.md lists what is",
    }


def test_rebound_name_is_no_alias() -> None:
    """A name that is bound again is no alias of TensorFlow."""
    names = found(
        """
        import tensorflow as tf

        layers = tf.layers
        losses = tf.losses
        absent = tf.debug

        def mean(losses):
            return losses.pop()

        layers = []
        layers.append(tf.nn.relu)
        """
    )
    assert (
        set(names) == {"tensorflow.nn.relu", "tensorflow.debug"}
        and names["tensorflow.nn.relu"] == ""
    )


def test_check_follows_star_imports() -> None:
    """The check follows an import of everything."""
    names = found("from tensorflow.python.ops.array_ops import *\nzeros([transpose])\nprint(np)")
    assert names == {
        "tensorflow.python.ops.array_ops.zeros": "",
        "tensorflow.python.ops.array_ops.transpose": "",
    }


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="lib2to3 is gone")
def test_check_reads_python_2(tmp_path: pathlib.Path) -> None:
    """The check reads Python 2."""
    program = tmp_path / "old.py"
    program.write_text(
        "import tensorflow as tf\nif 1 <> 2:\n\tprint tf.zeros, `1`\n        exec 'x' in {}\n"
    )
    read = check.check(program)
    assert read.python2 and [(use.line, use.name) for use in read.uses] == [(3, "tensorflow.zeros")]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness.tf1", "--check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)


@pytest.mark.cluster
def test_report_counts_names_per_file(tmp_path: pathlib.Path) -> None:
    """The report counts names by file and in all, with an exit code for what is missing."""
    (tmp_path / "whole.py").write_text(
        "import tensorflow as tf\ntf.zeros([1])\ntf.zeros([2])\nexit('not run')\n"
    )
    (tmp_path / "lacks.py").write_text(
        "import tensorflow as tf\n\ntf.ones\ntf.estimator\ntf.estimator\ntf.keras.layers\n"
    )
    (tmp_path / "other.py").write_text("print('no names')\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    done = run(str(tmp_path))
    assert done.returncode == 1 and done.stderr == ""
    broken, *lines = done.stdout.splitlines()
    assert broken.startswith(f"{tmp_path}/broken.py: cannot be read: ")
    assert lines == [
        f"{tmp_path}/lacks.py: 1 of 3 names of TensorFlow's are here",
        f"{tmp_path}/lacks.py:4: tf.estimator is not in harness.tf1: "
        "tf.train.MonitoredTrainingSession, or harness.Supervisor",
        f"{tmp_path}/lacks.py:6: tf.keras.layers is not in harness.tf1: "
        "make weights with tf.get_variable, or call a Flax or Equinox module with rt.call",
        f"{tmp_path}/whole.py: 1 of 1 names of TensorFlow's are here",
        "all: 1 of 2 files that use TensorFlow are complete; 2 of 4 names of TensorFlow's are here",
        "all: tensorflow.estimator is missing in 1 file",
        "all: tensorflow.keras.layers is missing in 1 file",
        "all: 1 files cannot be read",
    ]
    one = run(str(tmp_path / "whole.py"))
    assert (one.returncode, one.stdout) == (
        0,
        f"{tmp_path}/whole.py: 1 of 1 names of TensorFlow's are here\n",
    )
    nothing = run(str(tmp_path / "other.py"))
    assert (nothing.returncode, nothing.stdout) == (
        0,
        f"{tmp_path}/other.py: nothing of TensorFlow's\n",
    )
    absent = run(str(tmp_path / "absent.py"))
    assert (
        absent.returncode == 1
        and "cannot be read" in absent.stdout
        and "absent.py" in absent.stdout
    )
