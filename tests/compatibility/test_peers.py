"""A peer of each version that was released is understood while its wire version is ours, else refused in one line.

The peers are clients as they were then (client_*.py), which import nothing of ours and are never
changed.
"""

import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

import runtime as rt
from runtime.wire import versions
from runtime.wire.versions import WIRE_VERSION
from tests.kit.processes import Program
from tests.runtime.stranger import key_of

HERE = pathlib.Path(__file__).parent
RELEASES = sorted(path.parent.name for path in HERE.glob("*/hello.txt"))
TASK = "/job:ps/task:0"


@pytest.fixture
def ps() -> Iterator[rt.Server]:
    with rt.local_cluster(ps=1, workers=1) as cluster:
        yield cluster.servers["ps", 0]


def session(release: str, server: rt.Server, *said: str) -> Any:
    client = HERE / f"client_{release.replace('.', '_')}.py"
    command = [sys.executable, str(client), server.address, TASK, key_of(server).hex(), *said]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=HERE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.cluster
@pytest.mark.parametrize("release", RELEASES)
def test_released_client_trains_or_learns_why(release: str, ps: rt.Server) -> None:
    """A released client trains or is told which versions differ."""
    seen = session(release, ps)
    theirs = int((HERE / release / "hello.txt").read_text())
    if theirs != WIRE_VERSION:
        code, text = seen["refused"]
        assert code == "UNIMPLEMENTED"
        assert (
            f"its client Bellwether {release} (wire version {theirs}): install one version on all "
            "tasks" in text
        )
        return
    assert seen == {
        "task": TASK,
        "joined": ["/job:worker/task:0"],
        "weights": [0.0, 0.0, 0.0],
        "count": 2,
        "pong": True,
        "variables": ["count", "weights"],
        "done": ["/job:worker/task:0"],
    }


@pytest.mark.cluster
@pytest.mark.parametrize(
    "said", [f"{WIRE_VERSION + 1} 9.1.0", f"{WIRE_VERSION - 1} 0.0.9", "x" * 200]
)
def test_other_wire_version_is_one_line(ps: rt.Server, said: str) -> None:
    """A client of another wire version is refused in one line."""
    code, text = session(RELEASES[-1], ps, said)["refused"]
    assert code == "UNIMPLEMENTED" and "\n" not in text and len(text) < 250
    assert text.startswith(
        f"this task runs Bellwether {rt.__version__} (wire version {WIRE_VERSION}) and its client "
    )
    assert text.endswith("install one version on all tasks of the cluster")
    wire, _, release = said.partition(" ")
    assert not release or f"Bellwether {release} (wire version {wire})" in text


SERVES = (
    "import runtime as rt; s = rt.Server(rt.ClusterSpec({cluster!r}), 'ps', 0); print('serves', "
    "flush=True); s.join()"
)


@pytest.mark.cluster
def test_session_ends_with_version_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session on a cluster of another version ends with the line that names both."""
    with rt.local_cluster(ps=1, workers=1) as free:
        cluster = {job: list(free.cluster.job_tasks(job)) for job in free.cluster.jobs}
    with Program("python", "-c", SERVES.format(cluster=cluster)) as ps:
        ps.expect("serves")
        monkeypatch.setattr(versions, "spoken", lambda: "99 99.0")
        line = r"its client Bellwether 99\.0 \(wire version 99\): install one version on all tasks"
        with rt.Server(rt.ClusterSpec(cluster), "worker", 0) as server, rt.Graph().as_default():
            with rt.device("/job:ps"):
                weights = rt.Variable([1.0])
            with (
                pytest.raises(rt.UnimplementedError, match=line) as told,
                rt.Session(server.target) as session,
            ):
                session.run(weights.initializer)
            assert told.value.message.startswith(
                f"at {cluster['ps'][0]} this task runs Bellwether "
            )
            with pytest.raises(rt.UnimplementedError, match=line):
                rt.probe(cluster["ps"][0], 60)


def test_health_check_needs_no_version(ps: rt.Server) -> None:
    """A health check is answered whatever version the caller has."""
    with grpc.insecure_channel(ps.address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=60, metadata=[("bellwether-wire", "99 99.0")]) == b"\x08\x01"


def test_last_release_is_kept() -> None:
    """The version in pyproject.toml has been recorded unless it is under development."""
    text = (HERE.parents[1] / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.+)"', text, re.MULTILINE)
    assert "dev" in version or version in RELEASES
