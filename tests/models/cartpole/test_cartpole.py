"""CartPole is solved by actor-critic workers that share their parameters."""

import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")
from models.cartpole import trainer  # noqa: E402


def test_player_begins_games_without_advantage() -> None:
    """A player returns moves of all games, and the move that begins a game has no advantage."""
    player = trainer.Player(games=3, seed=0)
    params = trainer.init_params()
    for _ in range(4):  # games end and begin
        over_before = player.over.copy()
        seen, moves, advantages, returns = player.play(params)
    assert seen.shape == (3 * trainer.TIME, 4)
    assert moves.shape == advantages.shape == returns.shape == (3 * trainer.TIME,)
    assert set(np.unique(moves)) == {0, 1}
    begins = advantages.reshape(trainer.TIME, 3)[0][over_before]
    assert (begins == 0).all()  # the move that begins a game again teaches nothing
    assert abs(advantages[advantages != 0].mean()) < 1e-5
    assert len(player.finished) > 3
    assert all(score >= 1 for score in player.finished)


@pytest.mark.nightly  # a whole training
def test_cartpole_is_solved(tmp_path: pathlib.Path) -> None:
    """Two workers solve CartPole."""
    launcher = [sys.executable, "-m", "harness.launch", "--ps=1", "--workers=2", "--"]
    program = [sys.executable, "-m", "models.cartpole.trainer", f"--logdir={tmp_path}"]
    done = subprocess.run([*launcher, *program], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (score,) = re.findall(r"Mean-Score: ([\d.]+)", done.stdout)
    assert float(score) >= 475  # what counts as solved
