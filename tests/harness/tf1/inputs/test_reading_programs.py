"""Programs that read, act and count words, as they were written: ``import tensorflow as tf``, run by the launcher."""

import ast
import pathlib
import re

import numpy as np
import pytest

import harness.tf1 as tf
from tests.kit import processes
from tests.runtime.kit import addresses

pytestmark = pytest.mark.chaos

PROGRAMS = "tests/harness/tf1/programs"


def _run(name: str, *flags: str) -> list[str]:
    """Runs a ps and two workers unchanged; gives what the workers said.

    All must end by themselves, with code 0.
    """
    hosts = [f"--{job}_hosts={','.join(at)}" for job, at in addresses(ps=1, worker=2).items()]
    command = ["python", "-m", "harness.tf1", f"{PROGRAMS}/{name}.py", *hosts, *flags]
    with processes.programs() as start:
        ps = start(*command, "--job_name=ps")
        workers = [start(*command, "--job_name=worker", f"--task_index={i}") for i in range(2)]
        said = [worker.result(150) for worker in workers]
        ps.result(60)
    return said


@pytest.fixture
def records(tmp_path: pathlib.Path) -> pathlib.Path:
    """Three files with 20 pictures each, bright in the quarter that the label tells."""
    for number in range(3):
        with tf.python_io.TFRecordWriter(tmp_path / f"{number}.tfrecord") as writer:
            for i in range(20):
                pixels = np.zeros(16, np.uint8)
                pixels[i % 4 * 4 : i % 4 * 4 + 4] = 255
                features = {
                    "pixels": tf.train.Feature(
                        bytes_list=tf.train.BytesList(value=[pixels.tobytes()])
                    ),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[i % 4])),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())
    return tmp_path


def test_workers_read_their_dataset_shares(records: pathlib.Path) -> None:
    """Each worker reads its share of a dataset."""
    said = _run("dataset_workers", f"--data_dir={records}", f"--log_dir={records}/log")
    for worker in said:
        count, labels, loss = re.search(r"read (\d+) of (\[.*\]) loss ([\d.]+)", worker).groups()
        assert int(count) == 30 * 10, "half of 60 records, ten times"
        assert len(ast.literal_eval(labels)) == 2 and float(loss) < 0.3, worker
    assert tf.train.latest_checkpoint(str(records / "log")) is not None


def test_readers_and_queues_train(records: pathlib.Path) -> None:
    """Readers and queues feed training under a Supervisor."""
    for worker in _run("record_readers", f"--data_dir={records}", f"--log_dir={records}/log"):
        batches, loss = re.search(r"batches (\d+) loss ([\d.]+)", worker).groups()
        assert int(batches) == 60 * 4 // 8 and float(loss) < 0.5, worker


def test_workers_may_have_own_networks() -> None:
    """Workers train networks of their own."""
    for worker in _run("actors"):
        assert "right [1, 1, 1]" in worker, worker


@pytest.mark.nightly
def test_word_and_recurrent_programs_train() -> None:
    """Word vectors and a recurrent network train."""
    with processes.programs() as start:
        said = start("python", "-m", "harness.tf1", f"{PROGRAMS}/sequences.py").result(150)
    assert "words True" in said and "recurrent True" in said, said
