"""Directories and files that somebody else has made: an error that names them, never a hang, a crash or gigabytes."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import tensorstore as ts

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


def test_hostile_json_files_are_named(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Pipes, devices, loops and huge files in place of JSON raise an error that names the
    checkpoint.
    """
    hostile = []
    for number, harm in enumerate((_pipe, _device, _nested, _items, sparse, _loop)):
        for file in (FILE_NAME, "default/_METADATA"):
            hostile.append(
                pathlib.Path(shutil.copytree(saved, tmp_path / f"{number}{file[:3]}" / "1"))
            )
            harm(hostile[-1] / file)
    told = outcome(RESTORE, saved, *hostile).splitlines()
    for path, line in zip(hostile, told, strict=False):
        assert (
            line.startswith(("DataLossError ", "DiskAwayError ", "UnavailableError "))
            and str(path) in line
        )


def test_too_deep_directory_is_refused(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A directory tree that is deeper than a checkpoint is refused."""
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


def test_huge_metadata_is_refused(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Metadata with a huge size is refused by name."""
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


def test_files_larger_than_arrays_are_refused(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Files that are far larger than the arrays are refused with both sizes."""
    hostile = pathlib.Path(shutil.copytree(saved, tmp_path / "1"))
    sparse(hostile / "default" / "hole")
    told = outcome(RESTORE, saved, hostile)
    assert "DataLossError" in told and "its files are 687" in told and "and its arrays 2000" in told


def test_foreign_compression_is_read(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Arrays that another program has compressed are read by both transfers."""
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


def test_event_file_as_pipe_is_harmless(tmp_path: pathlib.Path) -> None:
    """A chief that starts again opens no event file of an earlier start, even if that file is a
    pipe.
    """
    os.mkfifo(tmp_path / "events.out.tfevents.1.host")
    with harness.FileWriter(tmp_path) as writer:
        writer.add_session_log("START", 10)


@pytest.mark.parametrize("harm", [_pipe, sparse], ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "train-images-idx3-ubyte.gz"])
def test_hostile_mnist_file_is_named(
    tmp_path: pathlib.Path, name: str, harm: Callable[[pathlib.Path], None]
) -> None:
    """A pipe or an empty giant in place of an MNIST file raises DataError with its directory."""
    (tmp_path / name).touch()
    harm(tmp_path / name)
    told = outcome(MNIST, tmp_path)
    assert "DataError" in told and str(tmp_path) in told
