"""64 workers and two ps on one machine: slow, but exact."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.harness.data.test_elastic import Run
from tests.kit.processes import ROOT

pytestmark = pytest.mark.nightly
WORKERS = 64
SECS = 280.0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_many_workers_train_exactly(tmp_path: pathlib.Path, sync: bool) -> None:
    """Sixty-four workers train every example once, every update is applied, and the end waits for
    all of them.
    """
    hurry = tmp_path / "hurry"
    options = {
        "sync": sync,
        "examples": 40_000,
        "pause": 5.0,
        "hurry": str(hurry),
        "slots": 256,
        "stop_grace_secs": 120,
    }
    with Run(2, 0, workers=WORKERS, lease_secs=120.0, **options) as cluster:
        workers = [cluster.worker(index) for index in range(WORKERS)]
        for worker in workers:
            worker.hear("STEP", secs=SECS)
        command = [
            sys.executable,
            "-m",
            "harness.status",
            f"--target={cluster.ps[0]}",
            "--json",
            "--timeout_secs=60",
        ]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        shown = json.loads(said.stdout)
        # a ps that knows itself
        assert shown["whole"] and len([t for t in shown["tasks"] if t["up"]]) == WORKERS + 1
        hurry.touch()
        end = workers[0].hear("END", secs=SECS)[1]
        assert [worker.wait(SECS) for worker in (*workers, *cluster.servers)] == [0] * (WORKERS + 2)
        batches = [
            number
            for worker in workers
            for _, number, counted in worker.said_so_far("STEP")
            if counted
        ]
        assert sorted(batches) == list(range(4000))
        if sync:
            assert end["accepted"] == 4000 and np.all(end["counts"] > 0)
        else:
            assert end["step"] == 4000 and np.all(end["counts"] == 1)
