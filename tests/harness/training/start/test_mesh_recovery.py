"""Workers that compute on meshes of four CPU devices lose tasks, and change their devices: real processes, real signals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness import cluster_kit
from tests.harness.checkpoints.checkpoint_kit import plain_orbax
from tests.harness.training.start import mesh_model

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.parametrize("synchronous", [False, True], ids=["asynchronous", "synchronous"]),
]


def check_values(values: list[Any], least: int) -> None:
    """Compares values with those of one device after as many steps."""
    step, *params = values
    assert step >= least
    for found, wanted in zip(params, mesh_model.trained(step), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_mesh_survives_deaths(tmp_path: Path, synchronous: bool) -> None:
    """After the death of a ps and of a worker in training a mesh has the values of one device."""
    options = {"devices": 4, "synchronous": synchronous, "logdir": str(tmp_path)}
    with cluster_kit.cluster(1, 1 + synchronous, **options) as c:
        ps = c.ps(0)
        workers = [c.worker(index) for index in range(1 + synchronous)]
        chief, last = workers[0], len(workers) - 1
        chief.request("steps", 10)
        chief.request("save", answer="SAVED")
        saved = cluster_kit.saved_step(tmp_path)
        for worker in workers:
            worker.tell("train")
            worker.hear("STEP")
        ps.kill()
        for worker in workers:
            worker.hear("LOG", "recovering: .*/job:ps/task:0")
        c.ps(0)
        for worker in workers:
            worker.hear("LOG", "recovered within")
            worker.hear("STEP")
        assert chief.said_so_far("LOG", f"recovered within .* at step {saved}: .* are lost")
        workers[last].kill()
        again = c.worker(last)
        again.request("steps", 5)
        if synchronous:
            # The chief has trained all the time.
            cluster_kit.pause(chief)
        check_values(again.request("values"), saved + 5)


def test_mesh_checkpoint_fits_other_devices(tmp_path: Path, synchronous: bool) -> None:
    """A checkpoint of a mesh has the same bytes on one device, on two, and in plain Orbax."""
    options = {"synchronous": synchronous, "logdir": str(tmp_path)}
    with cluster_kit.cluster(2, 1, devices=4, **options) as c:
        c.ps(0)
        c.ps(1)
        chief = c.worker(0)
        chief.request("steps", 10)
        chief.request("save", answer="SAVED")
        saved = chief.request("values")
    step, arrays = plain_orbax(tmp_path / "model.ckpt")
    assert [step, arrays["net/b"].tolist(), arrays["net/w"].tolist()] == saved
    for devices in (0, 2):
        with cluster_kit.cluster(1, 1, devices=devices, **options) as c:
            c.ps(0)
            chief = c.worker(0)
            assert chief.request("values") == saved
            chief.request("steps", 5)
            check_values(chief.request("values"), step + 5)
