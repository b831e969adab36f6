"""Workers that are added to a running cluster by a launcher of their own train with it."""

import pathlib
import re

import pytest

from tests.kit import real_mnist
from tests.kit.processes import Program

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize("mode", [pytest.param("nosync", marks=pytest.mark.nightly), "sync"])
def test_added_workers_train_and_leave(tmp_path: pathlib.Path, mode: str) -> None:
    """Workers that a second launcher adds train with the cluster and leave it, and the first worker
    continues.
    """
    trainer = [
        "python",
        "-m",
        "models.mnist.trainer",
        f"--{mode}",
        "--elastic",
        "--hidden_units=10",
    ]
    trainer += [
        "--epochs=1e9",
        f"--logdir={tmp_path}",
        "--save_summaries_secs=0",
        "--log_every_steps=20",
    ]
    launch = ["python", "-m", "harness.launch"]
    with Program(*launch, "--ps=2", "--workers=1", "--", *trainer, env=real_mnist.ENVIRON) as first:
        first.expect(r"worker/0 .*step \d+")
        # in whatever order
        said = sorted(re.findall(r"/job:ps/task:\d serves at grpc://\S+", first.output()))
        ps = [line.rpartition("/")[2] for line in said]
        added = [f"--ps_hosts={','.join(ps)}", "--first_worker=1", "--workers=2"]
        with Program(*launch, *added, "--", *trainer, env=real_mnist.ENVIRON) as second:
            for index in (1, 2):
                pattern = rf"worker/{index} .*step \d+"
                while not second.lines(pattern):  # in whatever order
                    second.expect(r"step \d+")
            second.signal(15)
            assert second.wait() == 143
            assert len(second.lines("left the training run, which goes on without this task")) == 2
        first.expect(r"worker/0 .*step \d+")
        first.signal(15)
        assert first.wait() == 143


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ps_hosts=a:1"], "--ps_hosts and --first_worker go together"),
        (["--first_worker=1"], "--ps_hosts and --first_worker go together"),
        (["--ps_hosts=a:1", "--first_worker=1", "--chief"], "leave --chief and --evaluators out"),
    ],
)
def test_conflicting_flags_are_refused(flags: list[str], said: str) -> None:
    """Flags of added workers that do not fit together are refused with the reason."""
    with Program("python", "-m", "harness.launch", *flags, "--", "true") as program:
        assert program.wait() == 2
        assert re.search(re.escape(said), program.output())
