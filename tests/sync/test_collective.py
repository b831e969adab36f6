"""Collective training: the model of one process, and a group that is lost and comes back."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import harness
import runtime as rt
from tests.sync.kit import ROOT, alone, free_ports
from tests.sync.task import batches

TASK = str(ROOT / "tests" / "sync" / "collective_task.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def _messages(text: str) -> list[dict]:
    lines = [line[line.index("{") :] for line in text.splitlines() if "{" in line]
    return [json.loads(line) for line in lines if line.startswith(('{"start"', '{"end"'))]


@pytest.mark.parametrize(("size", "rule"), [(1, "sgd"), (2, "adam"), (4, "sgd")])
def test_the_model_is_that_of_one_process_on_all_batches(size: int, rule: str) -> None:
    hosts = ",".join(free_ports(size))
    processes = [
        subprocess.Popen(
            [sys.executable, TASK, f"--worker_hosts={hosts}", f"--task_index={i}", f"--rule={rule}"],
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        for i in range(size)
    ]
    try:
        outputs = [p.communicate(timeout=100)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [p.returncode for p in processes] == [0] * size
    for output in outputs:
        for mine, wanted in zip(_messages(output)[-1]["values"], alone(rule, *batches(size)), strict=True):
            np.testing.assert_allclose(np.array(mine), wanted, rtol=2e-5, atol=2e-6)


def test_a_lost_group_starts_again_from_the_newest_checkpoint(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, TASK, f"--logdir={tmp_path}", "--steps=400", "--save_secs=0.2", "--die_at=200"]
    done = subprocess.run(
        [sys.executable, "-m", "harness.launch", "--ps=0", "--workers=2", "--", *command],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=ROOT,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    messages = _messages(done.stdout)
    starts = [m["start"] for m in messages if "start" in m]
    ends = [m for m in messages if "end" in m]
    assert starts.count(0) >= 2
    assert 0 < max(starts) <= 200  # both processes went on from one checkpoint of before the death
    assert starts.count(max(starts)) == 2
    assert [m["end"] for m in ends] == [400, 400]
    assert ends[0]["values"] == ends[1]["values"]


def test_a_number_outside_the_group_is_refused() -> None:
    with pytest.raises(rt.InvalidArgumentError, match="process 2 is not among the 2"):
        harness.join_group(["a:1", "b:1"], 2)


def test_a_group_of_one_raises_as_ever() -> None:
    group = harness.join_group(["localhost:1"], 0)
    assert group.logdir("x") == "x"
    with pytest.raises(KeyError), group.member():
        raise KeyError("of the user")
