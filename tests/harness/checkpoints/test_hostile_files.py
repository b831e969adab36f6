"""Directories and files that somebody else has made: an error that names them, never a hang, a crash or gigabytes."""

import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import tensorstore as ts
from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import masked_crc32c

import harness
import runtime as rt
from harness.checkpoints.manifest import FILE_NAME
from tests.kit.processes import ROOT

pytestmark = pytest.mark.disk

MEMORY = 1 << 30
"""How much more memory a process may take for a hostile file than it has without one."""
SECS = 120
LIMIT = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))  # not only what is touched is limited
"""
RESTORE = """
import resource, sys
import numpy as np
import harness
import runtime as rt

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

with rt.Graph().as_default() as graph, rt.Session("", graph) as sess:
    rt.Variable(np.zeros(500, np.float32), name="v")
    saver = harness.Saver()
    saver.restore(sess, sys.argv[1])  # a good one: what this takes is not the hostile one's
    before = peak()
    for path in sys.argv[2:]:
        try:
            saver.restore(sess, path)
            print("restored", path)
        except (rt.OpError, ValueError) as error:
            print(type(error).__name__, error)
print("bytes", peak() - before)
"""
EVENTS = """
import resource, sys
from harness.tensorboard.writer import points_to_repeat

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(len(points_to_repeat(sys.argv[1], 20)))
print("bytes", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before << 10)
"""
MNIST = """
import resource, sys
from models.mnist import data

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    data.load(sys.argv[1])
except data.DataError as error:
    print(type(error).__name__, error)
print("bytes", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before << 10)
"""


def outcome(program: str, *arguments: object, most: int = MEMORY) -> str:
    """What a program of its own process printed; it neither hung nor crashed, and took little memory."""
    done = subprocess.run(
        [sys.executable, "-c", LIMIT + program, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECS,
    )
    assert done.returncode == 0, done.stderr
    told, _, taken = done.stdout.rpartition("bytes ")
    assert int(taken) < most, f"it took {int(taken) >> 20} MiB"
    return told + done.stderr


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Step 1 of a variable ``v``."""
    logdir = tmp_path_factory.mktemp("saved")
    with rt.Graph().as_default() as graph, rt.Session("", graph) as sess:
        rt.Variable(np.zeros(500, np.float32), name="v")
        sess.run(rt.global_variables_initializer())
        return pathlib.Path(harness.Saver().save(sess, str(logdir / "m"), 1))


def sparse(path: pathlib.Path, size: int = 1 << 36) -> None:
    """A file that has a size and no content: it takes no room on the disk."""
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def _pipe(path: pathlib.Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _device(path: pathlib.Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _nested(path: pathlib.Path) -> None:
    path.write_text("[" * 1_000_000)


def _items(path: pathlib.Path) -> None:
    path.write_text("[" + "[]," * 40_000_000 + "[]]")


def _loop(path: pathlib.Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def test_files_of_json_that_are_none(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    hostile = []
    for number, harm in enumerate((_pipe, _device, _nested, _items, sparse, _loop)):
        for file in (FILE_NAME, "default/_METADATA"):
            hostile.append(pathlib.Path(shutil.copytree(saved, tmp_path / f"{number}{file[:3]}" / "1")))
            harm(hostile[-1] / file)
    told = outcome(RESTORE, saved, *hostile).splitlines()
    for path, line in zip(hostile, told, strict=False):
        assert line.startswith(("DataLossError ", "DiskAwayError ", "UnavailableError ")) and str(path) in line


def test_a_tree_that_is_deeper_than_a_checkpoint(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    hostile = pathlib.Path(shutil.copytree(saved, tmp_path / "1"))
    before = os.getcwd()
    try:
        os.chdir(hostile / "default")
        for _ in range(2000):  # deeper than a path can say
            os.mkdir("deep-directory")
            os.chdir("deep-directory")
    finally:
        os.chdir(before)
    told = outcome(RESTORE, saved, hostile)
    subprocess.run(["rm", "-rf", hostile], check=True)  # deeper than Python's own way
    assert "DataLossError" in told and "deeper directories" in told


def test_metadata_that_fills_a_disk(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    hostile = foreign(saved, tmp_path / "1")
    sparse(hostile / "default" / "manifest.ocdbt")
    told = outcome(RESTORE, saved, hostile)
    assert "DataLossError" in told and str(hostile) in told


def foreign(saved: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """A copy of a checkpoint that says that another program has saved it, without its arrays."""
    made = pathlib.Path(shutil.copytree(saved, directory))
    (made / FILE_NAME).unlink()  # so nobody says which size its files should have
    (made / "_CHECKPOINT_METADATA").write_text("{}")
    tree = made / "default" / "_METADATA"
    tree.write_text(tree.read_text().replace("bellwether", "another"))
    (made / "default" / "manifest.ocdbt").unlink()
    for path in (made / "default").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    return made


ARRAY = {
    **{"zarr_format": 2, "shape": [500], "chunks": [500], "dtype": "<f4"},
    **{"fill_value": None, "order": "C", "filters": None},
}


def store_with(item: pathlib.Path, values: dict[str, bytes], *, packed_index: bool) -> None:
    """An OCDBT store with these values, as another program may write it."""
    config = {"max_inline_value_bytes": 1 << 20, "max_decoded_node_bytes": (1 << 31) - 1}
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{item}/"}, "config": config}
    if not packed_index:
        config["compression"] = None  # type: ignore[assignment]
    store = ts.KvStore.open(spec).result()
    transaction = ts.Transaction(atomic=True)
    writing = store.with_transaction(transaction)
    for key, value in values.items():
        writing.write(key, value)
    transaction.commit_async().result()


def test_files_that_dwarf_the_arrays(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    hostile = pathlib.Path(shutil.copytree(saved, tmp_path / "1"))
    sparse(hostile / "default" / "hole")
    told = outcome(RESTORE, saved, hostile)
    assert "DataLossError" in told and "its files are 687" in told and "and its arrays 2000" in told


def test_what_others_have_packed_is_read(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    values = np.arange(500, dtype=np.float32)
    about = json.dumps({**ARRAY, "compressor": {"id": "zlib", "level": 9}}).encode()
    for number, packed_index in enumerate((False, True)):
        path = foreign(saved, tmp_path / f"{number}" / "1")
        chunk = zlib.compress(values.tobytes())
        store_with(path / "default", {"v/.zarray": about, "v/0": chunk}, packed_index=packed_index)
        for transfer in ("shared", "stream"):
            with rt.Graph().as_default() as graph, rt.Session("", graph) as sess:
                v = rt.Variable(np.zeros(500, np.float32), name="v")
                harness.Saver(transfer=transfer).restore(sess, str(path))
                assert sess.run(v).tolist() == values.tolist()


def record(data: bytes) -> bytes:
    """A record of an event file, with its checksums."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def point(tag: str, step: int) -> bytes:
    value = summary_pb2.Summary.Value(tag=tag, simple_value=1.0)
    return event_pb2.Event(step=step, summary=summary_pb2.Summary(value=[value])).SerializeToString()


def test_an_event_file_that_is_a_pipe(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "events.out.tfevents.1.host"
    os.mkfifo(path)
    assert f"{path} cannot be read" in outcome(EVENTS, tmp_path)


def test_an_event_that_is_as_long_as_a_disk(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "events.out.tfevents.1.host"
    length = struct.pack("<Q", 1 << 35)
    path.write_bytes(record(point("loss", 1)) + length + struct.pack("<I", masked_crc32c(length)))
    os.truncate(path, path.stat().st_size + (1 << 35) + 4)
    with path.open("ab") as file:
        file.write(record(point("loss", 30)))
    told = outcome(EVENTS, tmp_path)
    assert told.startswith("1\n") and f"a record of {1 << 35} bytes is skipped" in told  # the last good point before it


def test_an_event_file_whose_rest_is_one_great_hole(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "events.out.tfevents.1.host"
    path.write_bytes(record(point("loss", 1)))
    os.truncate(path, 1 << 32)
    assert outcome(EVENTS, tmp_path).startswith("0\n")


@pytest.mark.chaos
def test_an_event_file_with_millions_of_tags(tmp_path: pathlib.Path) -> None:
    with (tmp_path / "events.out.tfevents.1.host").open("wb") as file:
        for number in range((1 << 16) + 2):
            file.write(record(point(f"tag{number}", 1)))
    told = outcome(EVENTS, tmp_path)
    assert told.startswith("0\n") and "too many tags" in told


@pytest.mark.parametrize("harm", [_pipe, sparse], ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "train-images-idx3-ubyte.gz"])
def test_an_mnist_file_that_is_none(tmp_path: pathlib.Path, name: str, harm: Callable[[pathlib.Path], None]) -> None:
    (tmp_path / name).touch()
    harm(tmp_path / name)
    told = outcome(MNIST, tmp_path)
    assert "DataError" in told and str(tmp_path) in told
