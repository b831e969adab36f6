"""The evaluator ends training when the model gets no better, and keeps the best checkpoint."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

import harness


@pytest.mark.nightly  # a whole training
def test_it_ends_by_itself(tmp_path: pathlib.Path) -> None:
    launcher = [sys.executable, "-m", "harness.launch", "--ps=1", "--workers=2", "--evaluators=1", "--"]
    program = [sys.executable, "-m", "models.early_stopping.trainer", f"--logdir={tmp_path}"]
    done = subprocess.run([*launcher, *program], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    ended = [int(step) for step in re.findall(r"training ended at step (\d+)", done.stdout)]
    assert len(ended) == 2 and max(ended) < 20_000  # nobody trains to the limit
    (best,) = re.findall(r"Best-Step: (\d+)", done.stdout)
    assert 0 < int(best) < min(ended)
    kept = harness.latest_checkpoint(str(tmp_path / "eval" / "best"))
    assert kept and harness.load_variable(kept, "global_step") == int(best)
    told = json.loads((tmp_path / "eval" / "evaluations.json").read_text())
    assert len(told["evaluations"] if isinstance(told, dict) else told) >= 7
