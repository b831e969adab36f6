"""FileWriter: files, order, threads, failures, and what a restart leaves of a crashed run."""

import pathlib
import re
import subprocess
import sys
import threading

import pytest
from tensorboardX.proto import event_pb2, summary_pb2

import runtime as rt
from harness import FileWriter, FileWriterCache
from harness.tensorboard.graph_def import graph_def
from tests.kit.events import read_events

ROOT = pathlib.Path(__file__).resolve().parents[3]


def files(logdir: pathlib.Path) -> list[pathlib.Path]:
    return sorted(logdir.glob("events.out.tfevents.*"))


def events(logdir: pathlib.Path) -> list:
    return [event for path in files(logdir) for event in read_events(str(path))]


def test_event_file_has_tensorflow_name(tmp_path: pathlib.Path) -> None:
    """An event file has TensorFlow's name and first record, in a directory that is made."""
    FileWriter(tmp_path / "new" / "dir", filename_suffix=".worker1").close()
    (path,) = files(tmp_path / "new" / "dir")
    assert re.fullmatch(r"events\.out\.tfevents\.\d{10}\..+\.worker1", path.name)
    assert [e.file_version for e in read_events(str(path))] == ["brain.Event:2"]


def test_events_keep_their_order(tmp_path: pathlib.Path) -> None:
    """Events are in the file in the order of their calls."""
    with FileWriter(tmp_path, rt.Graph()) as writer:
        writer.add_session_log("START", 3)
        writer.add_summary(
            summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag="a", simple_value=1)]), 4
        )
        writer.add_scalars({"b": 2.0}, 5)
        writer.add_session_log("CHECKPOINT", 5, checkpoint_path="model.ckpt")
        writer.add_session_log("STOP")
    found = events(tmp_path)
    kinds = [e.WhichOneof("what") for e in found]
    assert kinds == [
        "file_version",
        "graph_def",
        "session_log",
        "summary",
        "summary",
        "session_log",
        "session_log",
    ]
    assert [e.step for e in found] == [0, 0, 3, 4, 5, 5, 0]
    assert found[5].session_log.checkpoint_path == "model.ckpt"


def test_flush_writes_everything(tmp_path: pathlib.Path) -> None:
    """flush returns when every event is on disk."""
    with FileWriter(tmp_path, flush_secs=1000) as writer:
        for step in range(500):
            writer.add_scalars({"a": step}, step)
        writer.flush()
        assert [e.step for e in events(tmp_path)[1:]] == list(range(500))


FORKS = """
import os, signal, sys, harness
writer = harness.FileWriter(sys.argv[1])
writer.flush()
if os.fork() == 0:
    signal.alarm(60)
    writer.add_scalars({"child": 1.0}, 1)
    writer.flush()
    sys.exit(0)
_, status = os.wait()
writer.add_scalars({"parent": 1.0}, 2)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.cluster
def test_forked_child_does_not_hang(tmp_path: pathlib.Path) -> None:
    """A forked child with a writer ends without the threads of its parent."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(tmp_path)], cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == 0
    assert [value.tag for event in events(tmp_path) for value in event.summary.value] == ["parent"]


@pytest.mark.disk  # waits for the flush of every two seconds
def test_events_reach_disk_soon(tmp_path: pathlib.Path) -> None:
    """By default an event is on disk soon."""
    with FileWriter(tmp_path) as writer:
        for step in range(2):  # the second comes after the flush at the start
            writer.add_scalars({"a": step}, step)
            for _ in range(3000):
                if len(events(tmp_path)) == step + 2:
                    break
                threading.Event().wait(0.01)
            assert [e.step for e in events(tmp_path)[1:]] == list(range(step + 1))


def test_many_threads_lose_no_event(tmp_path: pathlib.Path) -> None:
    """Events of many threads are all written, in each thread's order."""
    with FileWriter(tmp_path) as writer:
        threads = [
            threading.Thread(
                target=lambda k=k: [writer.add_scalars({f"t{k}": i}, i) for i in range(50)]
            )
            for k in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = events(tmp_path)[1:]
    for k in range(4):
        assert [e.step for e in found if e.summary.value[0].tag == f"t{k}"] == list(range(50))


def test_events_after_close_use_new_file(tmp_path: pathlib.Path) -> None:
    """Events after close are in a new file."""
    writer = FileWriter(tmp_path)
    for step in range(3):
        writer.add_scalars({"a": 1.0}, step)
        writer.close()
        writer.close()
    assert len(files(tmp_path)) == 3
    assert [e.step for e in events(tmp_path) if e.HasField("summary")] == [0, 1, 2]


@pytest.mark.cluster
def test_forgotten_close_loses_no_event(tmp_path: pathlib.Path) -> None:
    """A program that forgets to close its writer loses no event."""
    code = "import sys, harness; harness.FileWriter(sys.argv[1], flush_secs=1000).add_scalars({'a': 1.0}, 7)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True, timeout=60)
    assert [e.step for e in events(tmp_path)[1:]] == [7]


def test_writer_refuses_wrong_types(tmp_path: pathlib.Path) -> None:
    """Summaries and graphs of wrong types are refused."""
    with FileWriter(tmp_path) as writer:
        with pytest.raises(TypeError, match="add_summary takes"):
            writer.add_summary("text", 1)
        with pytest.raises(TypeError, match="add_graph takes"):
            writer.add_graph("text")


def test_unwritable_directory_is_one_line(tmp_path: pathlib.Path) -> None:
    """A directory that cannot be written to raises an error of one line."""
    (tmp_path / "file").touch()
    for place, why in (
        (tmp_path / "file" / "run", "Not a directory"),
        (pathlib.Path("/proc/run"), "No such file"),
    ):
        with pytest.raises(
            rt.PermissionDeniedError, match=f"to the logdir {place} \\({why}.*: give a directory"
        ) as caught:
            FileWriter(place)
        assert "\n" not in caught.value.message


def test_cached_writers_name_their_directory(tmp_path: pathlib.Path) -> None:
    """A writer of the cache returns its directory from get_logdir."""
    assert FileWriterCache.get(tmp_path).get_logdir() == str(tmp_path)
    FileWriterCache.clear()


def test_cache_holds_writer_per_directory(tmp_path: pathlib.Path) -> None:
    """The cache holds one writer for each directory."""
    try:
        assert FileWriterCache.get(tmp_path / "a") is FileWriterCache.get(str(tmp_path / "a"))
        assert FileWriterCache.get(tmp_path / "a") is not FileWriterCache.get(tmp_path / "b")
    finally:
        FileWriterCache.clear()


def test_graph_def_has_all_parts() -> None:
    """A graph in an event file has scopes, devices, shapes and edges."""
    with rt.Graph().as_default() as graph:
        with rt.device("/job:ps/task:1"):
            w = rt.Variable([1.0, 2.0], name="w")
        with (
            rt.device("/job:worker/task:0"),
            rt.name_scope("model"),
            rt.control_dependencies([w.initializer]),
        ):
            rt.placeholder("float32", [None, 2], "x")
            rt.identity(w, name="y")
        w.assign_add([1.0, 1.0], name="add")
    nodes = {node.name: node for node in graph_def(graph).node}
    assert nodes["model/y"].device == "/job:worker/task:0"
    assert nodes["w"].device == "/job:ps/task:1"
    assert [d.size for d in nodes["model/x"].attr["_output_shapes"].list.shape[0].dim] == [-1, 2]
    assert "w/read_1" in nodes["model/y"].input  # a read of its own, after the initializer
    assert any(i.startswith("^w/") for i in nodes["model/y"].input)
    assert "w" in nodes["add"].input
    assert all(i.lstrip("^").split(":")[0] in nodes for node in nodes.values() for i in node.input)


def write_run(
    logdir: pathlib.Path, start: int, steps: range, tags: dict[str, float], suffix: str = ""
) -> None:
    with FileWriter(logdir, filename_suffix=suffix) as writer:
        writer.add_session_log("START", start)
        for step in steps:
            writer.add_scalars({tag: base + step for tag, base in tags.items()}, step)


def test_cut_file_is_read_partly(tmp_path: pathlib.Path) -> None:
    """An event file that was cut off is read up to the cut."""
    write_run(tmp_path, 0, range(5), {"a": 0})
    (path,) = files(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:-7])
    assert [e.step for e in read_events(str(path)) if e.HasField("summary")] == [0, 1, 2, 3]
    assert isinstance(next(iter(read_events(str(path)))), event_pb2.Event)


def test_on_scalars_receives_every_number(tmp_path: pathlib.Path) -> None:
    """on_scalars is called with each number and its step, and its errors end nothing."""
    got: list[tuple[dict[str, float], int | None]] = []
    with FileWriter(str(tmp_path)) as writer:
        writer.on_scalars = lambda scalars, step: got.append((dict(scalars), step))
        writer.add_scalars({"loss": 1.0, "rate": 2.0}, 3)
        writer.add_scalars({"loss": 0.5})
        writer.on_scalars = lambda scalars, step: [][0]
        writer.add_scalars({"loss": 0.25}, 4)
        writer.on_scalars = None
        writer.add_scalars({"loss": 0.125}, 5)
    assert got == [({"loss": 1.0, "rate": 2.0}, 3), ({"loss": 0.5}, None)]


def test_writer_options_are_keywords(tmp_path: pathlib.Path) -> None:
    """The options of a writer must be named, so that TensorFlow's queue length is not taken for
    seconds.
    """
    with pytest.raises(TypeError, match="positional"):
        FileWriter(tmp_path, None, 10, 30)  # type: ignore[misc]
