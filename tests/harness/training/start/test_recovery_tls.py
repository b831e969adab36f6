"""Certificates, over TCP alone, when tasks die, freeze, get new certificates or end: processes of their own."""

from pathlib import Path

import pytest

from harness.certs import CA
from tests.harness import cluster_kit
from tests.harness.cluster_kit import consistent
from tests.kit import certificates

pytestmark = pytest.mark.chaos


@pytest.fixture
def authority() -> CA:
    return CA.make()


@pytest.fixture
def env(tmp_path: Path, authority: CA) -> dict[str, str]:
    directory = certificates.make(tmp_path / "certs", authority)
    return {"BELLWETHER_SECURITY": str(directory), "BELLWETHER_FAST_PATH": "0"}


def test_ps_returns_with_new_certificate(
    tmp_path: Path, env: dict[str, str], authority: CA
) -> None:
    """A cluster recovers when a ps dies and comes back with another certificate."""
    with cluster_kit.cluster(2, 2, logdir=str(tmp_path / "run"), env=env) as c:
        ps = [c.ps(0)]
        second = c.ps(1)
        chief, other = c.worker(0), c.worker(1)
        assert chief.request("steps", 10) == 10
        chief.request("save", answer="SAVED")
        assert other.request("steps", 7) == 17
        second.kill()
        certificates.write(tmp_path / "certs", "here", authority, certificates.pair_of(authority))
        for worker in (chief, other):
            worker.tell("train")
            worker.hear("LOG", "recovering: .*/job:ps/task:1")
        ps.append(c.ps(1))
        for worker in (chief, other):
            worker.hear("LOG", "recovered within")
            worker.hear("STEP")
        done = cluster_kit.pause(chief, other)
        assert consistent(chief.request("values")) == 10 + done
        other.tell("end")
        chief.tell("end")
        assert [t.wait() for t in (other, chief, *ps)] == [0, 0, 0, 0]


def test_frozen_tls_ps_stays_exact(env: dict[str, str]) -> None:
    """A frozen ps with TLS loses and doubles no step."""
    with cluster_kit.cluster(1, 2, env=env) as c:
        cluster_kit.check_freeze(c.ps(0), 0, c.worker(0), c.worker(1))


def test_worker_of_other_ca_ends(env: dict[str, str], tmp_path: Path) -> None:
    """A worker of another CA ends at once, and the training is not disturbed."""
    with cluster_kit.cluster(1, 2, env=env) as c:
        c.ps(0)
        chief = c.worker(0)
        chief.tell("train")
        chief.hear("STEP")
        stranger = c.start(
            "worker",
            1,
            env={**env, "BELLWETHER_SECURITY": str(certificates.make(tmp_path / "other"))},
        )
        assert "its certificate is of another CA" in stranger.hear("ERROR")[1]
        done = cluster_kit.pause(chief)
        assert consistent(chief.request("values")) == done
        assert not chief.said_so_far("LOG", "recovering")
