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
from harness import exit_codes
from tests.harness.optimizers.kit import alone, free_addresses, in_threads
from tests.harness.optimizers.task import batches
from tests.kit.processes import ROOT, Program, programs

pytestmark = pytest.mark.chaos

GOAL = 1500
TASK = ["python", "-m", "tests.harness.optimizers.collective_task"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def _messages(text: str) -> list[dict]:
    lines = [line[line.index("{") :] for line in text.splitlines() if "{" in line]
    return [json.loads(line) for line in lines if line.startswith(('{"start"', '{"end"'))]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_model_is_that_of_one_process_on_all_batches(size: int) -> None:
    hosts, rules = ",".join(free_addresses(size)), ["sgd", "adam"]
    command = [*TASK, f"--worker_hosts={hosts}", f"--rules={','.join(rules)}"]
    with programs() as start:
        outputs = [task.result() for task in [start(*command, f"--task_index={i}") for i in range(size)]]
    for output in outputs:
        ends = [m for m in _messages(output) if "end" in m]
        for end, rule in zip(ends, rules, strict=True):
            for mine, wanted in zip(end["values"], alone(rule, *batches(size)), strict=True):
                np.testing.assert_allclose(np.array(mine), wanted, rtol=2e-5, atol=2e-6)


def test_a_lost_group_starts_again_from_the_newest_checkpoint(tmp_path: pathlib.Path) -> None:
    command = [*TASK, f"--logdir={tmp_path}", f"--steps={GOAL}", "--save_secs=0.2", "--die_at=200"]
    done = subprocess.run(  # as anybody starts it: the launcher starts its tasks cold
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
    assert 0 < max(starts) < GOAL  # both processes went on from one checkpoint of before the death
    assert starts.count(max(starts)) == 2
    assert [m["end"] for m in ends] == [GOAL, GOAL]
    assert ends[0]["values"] == ends[1]["values"]


@pytest.mark.parametrize("dies", [0, 1])
def test_a_cluster_manager_may_start_each_process_again_by_itself(tmp_path: pathlib.Path, dies: int) -> None:
    """As Kubernetes or systemd do: at once, each on its own, knowing nothing of the group; the hosts stay the same."""
    hosts = ",".join(free_addresses(2))
    command = [*TASK, f"--worker_hosts={hosts}", f"--logdir={tmp_path}", f"--steps={GOAL}"]
    command += ["--save_secs=0.2", "--die_at=200", f"--dies={dies}"]
    codes: list[list[int]] = [[], []]

    def manage(index: int) -> list[dict]:
        said: list[dict] = []
        while not codes[index] or codes[index][-1] != 0 and len(codes[index]) < 20:
            attempt = {"BELLWETHER_ATTEMPT": str(len(codes[index]))}
            with Program(*command, f"--task_index={index}", env=attempt) as task:
                codes[index].append(task.wait())
                said += _messages(task.output())
        return said

    said = in_threads([lambda: manage(0), lambda: manage(1)], 200)
    assert codes[dies][0] == -9
    assert codes[1 - dies][0] == exit_codes.LOST.plain
    assert codes[0][-1] == codes[1][-1] == 0, codes
    newest = [max(m["start"] for m in messages if "start" in m) for messages in said]
    assert 0 < newest[0] == newest[1] < GOAL
    ends = [messages[-1] for messages in said]
    assert [end["end"] for end in ends] == [GOAL, GOAL]
    assert ends[0]["values"] == ends[1]["values"]


def test_a_number_outside_the_group_is_refused() -> None:
    with pytest.raises(rt.InvalidArgumentError, match="process 2 is not among the 2"):
        harness.join_group(["a:1", "b:1"], 2)


def test_a_group_of_several_hosts_is_insecure_and_has_to_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BELLWETHER_SECURITY", raising=False)
    for given in (None, rt.Security(certificates="certs"), rt.Security("token")):
        with pytest.raises(rt.InvalidArgumentError) as caught:
            harness.join_group(["ps0:1", "ps1:1"], 0, security=given)
        said = str(caught.value)
        assert (
            "ps0:1 lets in whoever reaches it" in said and "BELLWETHER_SECURITY=insecure" in said and "\n" not in said
        )


def test_a_group_of_one_raises_as_ever() -> None:
    group = harness.join_group(["localhost:1"], 0)
    assert group.logdir("x") == "x"
    with pytest.raises(KeyError), group.member():
        raise KeyError("of the user")
