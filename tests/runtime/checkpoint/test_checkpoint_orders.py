"""Orders about checkpoints from somebody who can connect: they stay below the root, and mean files of checkpoints."""

import contextlib
import logging
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import numpy as np
import pytest
import tensorstore as ts

import harness
import runtime as rt
from runtime.checkpoint.participant import UNFENCED
from runtime.checkpoint.roots import ROOT_VARIABLE, Roots, roots_of
from runtime.proto import services_pb2 as pb
from runtime.server.options import ServerOptions
from tests.kit.processes import ROOT
from tests.runtime import kit
from tests.runtime.stranger import Stranger, refused, slice_of, stranger

ORDER = pb.CheckpointOrder
DENIED, INVALID = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT
EXISTS, LOST = grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.DATA_LOSS
UNMET = grpc.StatusCode.FAILED_PRECONDITION
VALUE = np.arange(6, dtype=np.float32)


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def elsewhere(root: pathlib.Path) -> pathlib.Path:
    return root.parent / "elsewhere"


@pytest.fixture
def server(root: pathlib.Path) -> Iterator[rt.Server]:
    """One task with the variable ``w``."""
    cluster = kit.addresses(local=1)
    with rt.Server(cluster, "local", 0, checkpoint_root=root) as made:
        with rt.Graph().as_default() as graph, rt.Session(made.target, graph) as sess:
            variable = rt.Variable(VALUE, name="w")
            sess.run(rt.global_variables_initializer())
            assert sess.run(variable).tolist() == VALUE.tolist()
            yield made


@pytest.fixture
def they(server: rt.Server) -> Iterator[Stranger]:
    with stranger(server) as made:
        yield made


def write(they: Stranger, directory: object) -> None:
    job = they.take([slice_of("w", VALUE)])
    they.order(write=ORDER.Write(job=job, directory=str(directory)))


def read(they: Stranger, directory: object) -> None:
    order = ORDER.Read(job=99, directory=str(directory), slices=[slice_of("w", VALUE)])
    they.order(read=order)


def files_below(directory: pathlib.Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*"))


def test_checkpoint_files_stay_below_root(
    they: Stranger, root: pathlib.Path, elsewhere: pathlib.Path
) -> None:
    """A task writes and reads checkpoints only below its root."""
    write(they, root)
    read(they, root / "ocdbt.process_1joblocaltask0")
    (elsewhere / "secret").write_bytes(b"1234")
    with refused(DENIED, str(elsewhere), str(root), "checkpoint_root"):
        write(they, elsewhere)
    with refused(DENIED, str(elsewhere)):
        read(they, elsewhere)
    assert files_below(elsewhere) == ["secret"]


@pytest.mark.parametrize("way", ["{root}/../elsewhere", "{root}/down/../../elsewhere", ".."])
def test_no_directory_goes_up(
    they: Stranger, root: pathlib.Path, elsewhere: pathlib.Path, way: str
) -> None:
    """A directory with `..` is refused and nothing is written."""
    (root / "down").mkdir()
    for act in (write, read):
        with refused(INVALID, ".."):
            act(they, way.format(root=root))
    assert not files_below(elsewhere)


def test_links_that_lead_out_are_refused(
    they: Stranger, root: pathlib.Path, elsewhere: pathlib.Path
) -> None:
    """A link that leads out of the root is refused, and a link within the root is read."""
    write(they, root)
    (elsewhere / "secret").write_bytes(b"1234")
    (root / "out").symlink_to(elsewhere)
    (root / "within").symlink_to(root / "ocdbt.process_1joblocaltask0")
    with refused(DENIED, "out"):
        write(they, root / "out")
    with refused(DENIED, "out"):
        read(they, root / "out")
    assert files_below(elsewhere) == ["secret"]
    read(they, root / "within")  # one that stays below the root is as good as what it leads to
    data = next(p for p in (root / "ocdbt.process_1joblocaltask0").rglob("*") if p.is_file())
    data.rename(elsewhere / "data")
    data.symlink_to(elsewhere / "data")
    with refused(DENIED, data.name):
        read(they, root / "ocdbt.process_1joblocaltask0")


def test_no_order_compares_files() -> None:
    """No order of the checkpoint protocol compares files."""
    orders = [field.message_type for field in ORDER.DESCRIPTOR.oneofs_by_name["order"].fields]
    assert orders and not [order.name for order in orders if "files" in order.fields_by_name]


@pytest.mark.parametrize("name", ["../elsewhere/w", "/etc/passwd", "a/../../elsewhere/w", ""])
def test_arrays_are_read_below_the_directory(they: Stranger, root: pathlib.Path, name: str) -> None:
    """The name of an array cannot leave its directory."""
    write(they, root)
    wanted = slice_of("w", VALUE)
    wanted.key = name
    with refused(INVALID, repr(name)):
        they.order(
            read=ORDER.Read(
                job=99, directory=str(root / "ocdbt.process_1joblocaltask0"), slices=[wanted]
            )
        )


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "directory"])
def test_only_regular_files_are_read(they: Stranger, root: pathlib.Path, kind: str) -> None:
    """A store with a pipe, a device or a socket is refused."""
    write(they, root)
    path = root / "ocdbt.process_1joblocaltask0" / "thing"
    with socket.socket(socket.AF_UNIX) as sock:
        {
            "pipe": lambda: os.mkfifo(path),
            "device": lambda: path.symlink_to("/dev/zero"),
            "socket": lambda: bind_below(sock, path),
            "directory": path.mkdir,
        }[kind]()
        if kind == "device":
            with refused(DENIED, "thing"):  # it is not below the root
                read(they, path.parent)
            return
        if kind != "directory":
            with refused(LOST, "thing", "not a regular file"):
                read(they, path.parent)


def bind_below(sock: socket.socket, path: pathlib.Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # the whole path may be too long for a socket's address
    try:
        sock.bind(path.name)
    finally:
        os.chdir(before)


def test_finished_checkpoint_is_never_rewritten(server: rt.Server, root: pathlib.Path) -> None:
    """A finished checkpoint is not written again, and restores as before."""
    with rt.Graph().as_default() as graph, rt.Session(server.target, graph) as sess:
        w = rt.Variable(np.zeros(6, np.float32), name="w")
        saver = harness.Saver()
        path = pathlib.Path(saver.save(sess, root / "model.ckpt", 5))
        before = {
            name: (path / name).read_bytes()
            for name in files_below(path)
            if (path / name).is_file()
        }
        with stranger(server) as they:
            with refused(EXISTS, str(path)):
                write(they, path / "default")
        assert {
            name: (path / name).read_bytes()
            for name in files_below(path)
            if (path / name).is_file()
        } == before
    with rt.Graph().as_default() as graph, rt.Session(server.target, graph) as sess:
        w = rt.Variable(np.zeros(6, np.float32), name="w")
        assert harness.Saver().restore_latest(sess, str(root)) == str(path)
        assert sess.run(w).tolist() == VALUE.tolist()


def test_begun_store_takes_no_other_job(they: Stranger, root: pathlib.Path) -> None:
    """A store that a job has begun is not written by another job."""
    (root / "ocdbt.process_1joblocaltask0").mkdir()
    with refused(EXISTS, "ocdbt.process_1joblocaltask0"):
        write(they, root)
    assert files_below(root) == ["ocdbt.process_1joblocaltask0"]


@pytest.mark.parametrize("rooted", [True, False])
def test_order_makes_task_ask_nobody(root: pathlib.Path, rooted: bool) -> None:
    """A path with another scheme is refused, and the task connects to no server for it."""
    cluster = kit.addresses(local=1)
    with (
        rt.Server(cluster, "local", 0, checkpoint_root=root if rooted else None) as server,
        stranger(server) as they,
    ):
        with socket.create_server(("127.0.0.1", 0)) as asked:
            asked.setblocking(False)
            host = f"127.0.0.1:{asked.getsockname()[1]}"
            for url in (
                f"http://{host}/a/",
                f"https://{host}/a/",
                "memory://a/",
                f"file://{root}/",
                "gs://b/x|http:",
            ):
                with refused(INVALID, url):
                    read(they, url)
            with pytest.raises(BlockingIOError):
                asked.accept()
    assert not files_below(root)


def test_urls_stay_below_their_root() -> None:
    """A URL is allowed below its own root only, and a URL with tricks is refused."""
    roots = Roots(("gs://bucket/run", "/data/run"))
    roots.check("gs://bucket/run")
    roots.check("gs://bucket/run/model.ckpt/12/default")
    for path in (
        "gs://bucket/runs",
        "gs://bucket",
        "s3://bucket/run",
        "gs://bucket/run2/x",
        "/data/runs",
    ):
        with pytest.raises(rt.PermissionDeniedError):
            roots.check(path)
    for path in (
        "gs://bucket/run/../x",
        "gs://bucket/run/%2e%2e/x",
        "gs://bucket/run?x",
        "",
        "/data/run/\0",
    ):
        with pytest.raises(rt.InvalidArgumentError):
            roots.check(path)


def test_roots_come_from_server_or_environment(root: pathlib.Path) -> None:
    """The roots of checkpoints come from the server's argument, and otherwise from the environment."""
    cluster = rt.ClusterSpec({"local": ["localhost:0"]})

    def roots(given: Any, told: Mapping[str, str]) -> Roots:
        return roots_of(ServerOptions(cluster, checkpoint_root=given).filled(told).checkpoint_root)

    told = {ROOT_VARIABLE: f"{root},gs://bucket/run"}
    assert roots(None, {}) == Roots(None)
    assert roots(None, told) == Roots((str(root), "gs://bucket/run"))
    assert roots("runs", told) == Roots((os.path.abspath("runs"),))
    assert roots([], told) == Roots(())
    for wrong in ("http://host/x", "", "gs://bucket/../b"):
        with pytest.raises(rt.InvalidArgumentError, match="checkpoint_root"):
            rt.Server(kit.addresses(local=1), "local", 0, checkpoint_root=[wrong], start=False)


def test_root_may_be_a_link(tmp_path: pathlib.Path) -> None:
    """A root may be a link or the directory behind the link."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for root in ("real", "link"):
        for path in ("real/a/b", "link/a/b", "real"):
            Roots((str(tmp_path / root),)).check(str(tmp_path / path))


def test_empty_root_keeps_no_checkpoints(root: pathlib.Path) -> None:
    """A server with an empty list of roots reads no checkpoint."""
    with (
        rt.Server(kit.addresses(local=1), "local", 0, checkpoint_root=[]) as server,
        stranger(server) as they,
    ):
        with refused(DENIED, "nowhere"):
            read(they, root)


def test_without_root_devices_are_refused(root: pathlib.Path) -> None:
    """A server without a root reads directories, but no device behind a link."""
    with rt.Server(kit.addresses(local=1), "local", 0) as server, stranger(server) as they:
        (root / "manifest.ocdbt").symlink_to("/dev/zero")
        with refused(LOST, "manifest.ocdbt is not a regular file"):
            read(they, root)


@pytest.mark.parametrize("packed", ["nothing", "the index", "a chunk"])
def test_task_reads_nothing_packed(they: Stranger, root: pathlib.Path, packed: str) -> None:
    """A task refuses a store whose index or chunks are packed, and reads a plain one."""
    about: dict[str, Any] = {
        "shape": [VALUE.size],
        "chunks": [VALUE.size],
        "compressor": {"id": "zlib", "level": 1},
    }
    base = {"driver": "file", "path": f"{root}/"}
    store: dict[str, Any] = {"driver": "ocdbt", "base": base, "config": {"compression": None}}
    if packed == "the index":
        del store["config"]
    if packed != "a chunk":
        about["compressor"] = None
    spec = {
        "driver": "zarr",
        "dtype": VALUE.dtype.name,
        "kvstore": {**store, "path": "w/"},
        "metadata": about,
    }
    ts.open(spec, create=True).result().write(VALUE).result()
    as_it_should = (
        contextlib.nullcontext() if packed == "nothing" else refused(UNMET, "is packed", "stream")
    )
    with as_it_should:
        read(they, root)


SERVE = """
import sys
import runtime as rt
for _ in range(2):
    with rt.Server({"local": [sys.argv[1]]}, "local", 0, checkpoint_root=sys.argv[2:] or None):
        pass
"""


@pytest.mark.cluster
@pytest.mark.parametrize(
    "host, root, warnings", [("localhost", [], 0), ("0.0.0.0", [], 1), ("0.0.0.0", ["/data"], 0)]
)
def test_reachable_server_without_root_warns(host: str, root: list[str], warnings: int) -> None:
    """A server that other hosts reach warns once that it has no checkpoint root."""
    done = subprocess.run(
        [sys.executable, "-c", SERVE, f"{host}:0", *root],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "BELLWETHER_SECURITY": "insecure"},
    )
    assert done.stderr.count("has no checkpoint root") == warnings, done.stderr


def test_rooted_tasks_save_and_restore(
    root: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two tasks with roots save and restore below them, and refuse a path elsewhere."""
    cluster = kit.addresses(ps=2, worker=1)
    caplog.set_level(logging.ERROR)
    with (
        rt.Server(cluster, "ps", 0, checkpoint_root=root),
        rt.Server(cluster, "ps", 1, checkpoint_root=[root.parent]),
    ):
        with rt.Server(cluster, "worker", 0, checkpoint_root=root) as worker:
            with rt.Graph().as_default() as graph, rt.Session(worker.target, graph) as sess:
                with rt.device("/job:ps/task:0"):
                    a = rt.Variable(VALUE, name="a")
                with rt.device("/job:ps/task:1"):
                    b = rt.Variable(VALUE + 1, name="b")
                sess.run(rt.global_variables_initializer())
                path = harness.Saver().save(sess, root / "model.ckpt", 7)
                sess.run([a.assign(VALUE * 0).op, b.assign(VALUE * 0).op])
                harness.Saver().restore(sess, path)
                assert (
                    sess.run(a).tolist() == VALUE.tolist()
                    and sess.run(b).tolist() == (VALUE + 1).tolist()
                )
                with pytest.raises(
                    rt.PermissionDeniedError,
                    match=r"/job:ps/task:0.*checkpoint_root|checkpoint_root",
                ):
                    harness.Saver().save(sess, root.parent / "elsewhere" / "model.ckpt", 7)


def test_unknown_order_is_refused(they: Stranger) -> None:
    """A checkpoint order of an unknown kind is refused."""
    with refused(INVALID, "does not know"):
        they.order()
    # `kind = 9`, as versions without types of orders had it
    earlier = ORDER.FromString(bytes([0x08, 9]))
    with refused(INVALID, "does not know"):
        they.worker.Checkpoint(earlier, timeout=30)


def test_order_has_its_own_fields_only() -> None:
    """A checkpoint order has the fields of its own kind only."""
    for of_none in ("job", "directory", "slices", "seconds"):
        with pytest.raises(ValueError, match=of_none):
            ORDER(**{of_none: None})
    with pytest.raises(ValueError, match="seconds"):
        ORDER.Take(job=1, seconds=5.0)  # type: ignore[call-arg]
    order = ORDER(take=ORDER.Take(job=1))
    order.drop.job = 1
    assert order.WhichOneof("order") == "drop" and not order.HasField("take")


@pytest.mark.parametrize(
    "name", sorted({f.name for f in ORDER.DESCRIPTOR.oneofs_by_name["order"].fields} - UNFENCED)
)
def test_orders_of_other_epoch_are_refused(they: Stranger, name: str) -> None:
    """Each checkpoint order that changes something is refused under another epoch."""
    for epoch in (they.epoch - 1, they.epoch + 1):
        with refused(grpc.StatusCode.ABORTED, f"epoch {epoch}"):
            they.order(epoch=epoch, **{name: {}})
