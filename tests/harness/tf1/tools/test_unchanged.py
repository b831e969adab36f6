"""Programs that are run unchanged, import lines included, and the data reader of TensorFlow's tutorials."""

import gzip
import pathlib
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import harness
import harness.tf1 as tf
from harness.tf1.tools import mnist_data, modules
from tests.kit.changes import SetVariables

ROOT = pathlib.Path(__file__).resolve().parents[4]
PROGRAM = ROOT / "tests" / "harness" / "tf1" / "programs" / "unchanged.py"


def write_idx(path: pathlib.Path, array: np.ndarray, zipped: bool = False) -> None:
    content = (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )
    path.write_bytes(gzip.compress(content) if zipped else content)


@pytest.fixture
def mnist(tmp_path: pathlib.Path) -> pathlib.Path:
    """The four files with few images: the label is the row that is white."""
    for name, count, zipped in (("train", 120, False), ("t10k", 30, True)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = np.zeros((count, 28, 28), np.uint8)
        images[np.arange(count), labels] = 255
        ending = ".gz" if zipped else ""
        write_idx(tmp_path / f"{name}-images-idx3-ubyte{ending}", images, zipped)
        write_idx(tmp_path / f"{name}-labels-idx1-ubyte{ending}", labels, zipped)
    return tmp_path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness.tf1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)


@pytest.mark.chaos
def test_program_runs_with_its_imports(mnist: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A program runs with its own imports, and missing modules give advice."""
    logdir = tmp_path / "log"
    done = run(str(PROGRAM), f"--data_dir={mnist}", f"--log_dir={logdir}", "rest")
    assert done.returncode == 0, done.stderr
    *advice, argv = done.stdout.splitlines()[-5:]
    assert argv == f"argv ['--data_dir={mnist}', '--log_dir={logdir}', 'rest']"
    assert [line.split(" is not in harness.tf1: ")[1] for line in advice] == [
        "jax.export",
        "jax.export",
        "scikit-learn, or write it in JAX",
        "jax.image inside rt.call, or a Python function in tf.py_func",
    ]
    events = [path for path in logdir.iterdir() if "tfevents" in path.name]
    assert len(events) == 1 and b"loss" in events[0].read_bytes()


@pytest.mark.chaos
def test_command_line_runs_programs_and_modules() -> None:
    """The command line shows its help, names a missing program, and runs modules."""
    assert "program.py" in run("--help").stdout
    nothing, missing, module = (
        run(),
        run("no_such_program.py"),
        run("-m", "tests.harness.tf1.programs.unchanged", "--helpshort"),
    )
    assert nothing.returncode == 2 and nothing.stderr.startswith("usage: python -m harness.tf1")
    assert missing.returncode == 2 and "there is no program no_such_program.py" in missing.stderr
    assert "where the data is" in module.stdout


CHILDREN = """
import multiprocessing, os, subprocess, sys
import tensorflow as tf
from tensorflow.contrib import slim

def spawned():
    print("spawned", tf.__git_version__, slim.conv2d.__name__, flush=True)

if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(print("child", tf.__git_version__))
    subprocess.check_call([sys.executable, __file__, "child"])
    process = multiprocessing.get_context("spawn").Process(target=spawned)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.chaos
def test_child_processes_find_tensorflow(tmp_path: pathlib.Path) -> None:
    """Child processes of a program find TensorFlow's names too, and TensorBoard is refused."""
    (tmp_path / "program.py").write_text(CHILDREN)
    done = run(str(tmp_path / "program.py"))
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        ["child bellwether", "spawned bellwether convolution2d"],
    )
    # TensorBoard uses TensorFlow where there is one: what it finds is not one.
    (tmp_path / "tensorboard").write_text("import tensorflow")
    (tmp_path / "starts.py").write_text(
        "import subprocess, sys\nsys.exit(subprocess.call([sys.executable, "
        f"{str(tmp_path / 'tensorboard')!r}]))\n"
    )
    refused = run(str(tmp_path / "starts.py"))
    assert (
        refused.returncode == 1
        and "ImportError: harness.tf1 is no TensorFlow for TensorBoard" in refused.stderr
    )


@pytest.fixture
def installed() -> Any:
    """TensorFlow's names for one test."""
    finders = list(sys.meta_path)
    modules.install()
    modules.install()
    yield
    sys.meta_path[:] = finders
    for name in [n for n in sys.modules if n == "tensorflow" or n.startswith("tensorflow.")]:
        del sys.modules[name]


def test_packages_have_their_modules(installed: None) -> None:
    """``from tensorflow.examples.tutorials import mnist`` has ``mnist.input_data``."""
    from tensorflow.examples.tutorials import mnist

    assert mnist.input_data.read_data_sets is mnist_data.read_data_sets


def test_unused_imports_cost_nothing(installed: None) -> None:
    """An import whose names are not used raises no error."""
    import tensorflow.contrib.kfac  # noqa: F401
    from tensorflow.contrib.learn.python.learn.datasets import mnist
    from tensorflow.python.ops import rnn_cell_impl, state_ops
    from tensorflow.python.training import moving_averages, training_util

    assert mnist.read_data_sets is mnist_data.read_data_sets
    assert (
        state_ops.assign is tf.assign and training_util.get_global_step is harness.get_global_step
    )
    assert "read_data_sets" in dir(mnist) and "reshape" in dir(state_ops)
    with pytest.raises(
        AttributeError, match=r"tf\.training\.moving_averages\.assign_moving_average"
    ):
        moving_averages.assign_moving_average  # noqa: B018
    with pytest.raises(AttributeError, match="rnn_cell_impl._Linear"):
        rnn_cell_impl._Linear  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        import tensorflow_hub  # noqa: F401


def test_absent_modules_advise_at_use(installed: None) -> None:
    """A name of an absent module says at its use what to use instead."""
    import tensorflow
    from tensorflow.contrib.layers import apply_regularization, xavier_initializer
    from tensorflow.contrib.learn import DNNClassifier

    assert xavier_initializer is tf.contrib.layers.xavier_initializer
    with pytest.raises(
        AttributeError, match=r"tf\.contrib\.layers\.apply_regularization is not in harness\.tf1"
    ):
        apply_regularization(1.0)
    with pytest.raises(
        AttributeError,
        match="DNNClassifier is not in harness.tf1: tf.train.MonitoredTrainingSession",
    ):

        class Mine(DNNClassifier):  # type: ignore[misc]
            pass

    with pytest.raises(
        AttributeError, match=r"tensorflow\.moments is not in harness\.tf1, but tf\.nn\.moments is"
    ):
        tensorflow.moments  # noqa: B018
    with pytest.raises(AttributeError, match="docs/tf1_names.md lists what is"):
        tensorflow.no_such_thing  # noqa: B018
    assert tensorflow.__version__ == tf.__version__ and tensorflow.train.Saver is tf.train.Saver


def test_reader_batches_cover_the_epoch(mnist: pathlib.Path) -> None:
    """The reader's batches hold every image once in an epoch, with its label."""
    data = mnist_data.read_data_sets(mnist, validation_size=20, seed=3)
    assert (data.train.num_examples, data.validation.num_examples, data.test.num_examples) == (
        100,
        20,
        30,
    )
    assert (
        data.train.images.shape == (100, 784)
        and data.train.images.dtype == np.float32
        and data.test.images.max() == 1
    )
    seen: list[int] = []
    for _ in range(5):
        images, labels = data.train.next_batch(30)
        assert (images.reshape(-1, 28, 28)[np.arange(30), labels] == 1).all()
        seen += labels.tolist()
    assert data.train.epochs_completed == 1
    assert sorted(seen[:100]) == sorted(list(range(10)) * 10) and seen[:100] != sorted(seen[:100])
    first = mnist_data.read_data_sets(
        mnist, one_hot=True, validation_size=0, reshape=False, dtype=np.uint8
    )
    images, labels = first.train.next_batch(4, shuffle=False)
    assert (
        images.shape == (4, 28, 28, 1)
        and images.dtype == np.uint8
        and labels.argmax(1).tolist() == [0, 1, 2, 3]
    )


def test_missing_or_damaged_data_is_named(
    mnist: pathlib.Path, tmp_path: pathlib.Path, set_variables: SetVariables
) -> None:
    """Missing or damaged MNIST files are named."""
    set_variables(XDG_CACHE_HOME=str(tmp_path / "cache"), MNIST_DIR=str(mnist))
    assert mnist_data.read_data_sets(tmp_path / "none", validation_size=0).train.num_examples == 120
    with pytest.raises(ValueError, match="between 0 and 120"):
        mnist_data.read_data_sets(mnist, validation_size=121)
    with pytest.raises(ValueError, match="a batch of 31 of 30"):
        mnist_data.read_data_sets(mnist, validation_size=0).test.next_batch(31)
    set_variables(MNIST_DIR=None)
    with pytest.raises(
        FileNotFoundError, match="no MNIST in .*none.*train-images-idx3-ubyte.*https://"
    ):
        mnist_data.read_data_sets(tmp_path / "none")
    whole = (mnist / "train-labels-idx1-ubyte").read_bytes()
    for damaged in (whole[:50], whole + b"x", b"", b"\x00\x00\x0d" + whole[3:]):
        (mnist / "train-labels-idx1-ubyte").write_bytes(damaged)
        with pytest.raises(
            ValueError, match="train-labels-idx1-ubyte is no MNIST file, or not all of one"
        ):
            mnist_data.read_data_sets(mnist)


def test_tutorial_model_learns(installed: Any) -> None:
    """The model of the tutorials learns."""
    from tensorflow.examples.tutorials.mnist import mnist

    import harness.tf1 as tf

    with tf.Graph().as_default():
        images, labels = tf.constant(np.eye(8, 784, dtype=np.float32)), tf.constant(np.arange(8))
        logits = mnist.inference(images, 16, 8)
        loss = mnist.loss(logits, labels)
        train, right = mnist.training(loss, 0.5), mnist.evaluation(logits, labels)
        assert logits.shape == (8, mnist.NUM_CLASSES)
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            before = sess.run(loss)
            for _ in range(60):
                sess.run(train)
            assert sess.run(loss) < before and 0 <= sess.run(right) <= 8
