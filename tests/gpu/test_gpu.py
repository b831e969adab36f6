"""What holds on a machine with an NVIDIA GPU: ``make test-gpu``, which skips this file where there is no card.

Tasks are fresh processes, whose JAX finds the GPU. The process of the tests keeps little of its memory.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax.experimental import pallas
from jax.experimental.pallas import triton

import harness.tf1 as tf
import runtime as rt
from harness.launch.gpus import find_gpus
from tests.harness.tf1.oracle import programs
from tests.kit.processes import ROOT
from tests.kit.waits import until

GPUS = find_gpus({**os.environ, "JAX_PLATFORMS": ""})
needed = pytest.mark.skipif(
    not GPUS, reason="no NVIDIA GPU: /dev/nvidiactl is missing, and nvidia-smi lists none"
)
pytestmark = [pytest.mark.gpu, needed]
MINIMAL = (sys.executable, "-m", "models.mnist.minimal")
TRAINER = (sys.executable, "-m", "models.mnist.trainer")
SECS = 240


def environment(**changes: str) -> dict[str, str]:
    """Returns the environment of a user on this host, with JAX's own choice of devices."""
    ours = ("JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {**kept, "PYTHONUNBUFFERED": "1", **changes}


def run(*command: str, **changes: str) -> str:
    """Runs a command; returns its output."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@contextlib.contextmanager
def launched(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Starts a launcher; ends what is left of it."""
    with subprocess.Popen(
        [sys.executable, "-m", "harness.launch", *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.terminate()


def has_gpu(process: psutil.Process) -> bool:
    """Returns True if a process has opened a card, which CUDA does for its first memory."""
    with contextlib.suppress(psutil.Error, OSError):
        files = pathlib.Path(f"/proc/{process.pid}/fd").iterdir()
        return any(str(file.readlink()).startswith("/dev/nvidia") for file in files)
    return False


def tasks_of(launcher: "subprocess.Popen[str]", job: str) -> list[psutil.Process]:
    """Returns the processes of a job."""
    found = []
    for process in psutil.Process(launcher.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            task = json.loads(process.environ().get("TF_CONFIG", "{}")).get("task", {})
            if task.get("type") == job:
                found.append(process)
    return found


def test_ps_stays_off_gpu() -> None:
    """A worker trains on a GPU, and its ps opens none."""
    arguments = ("--ps=1", "--workers=1", "--require_gpu", "--", *MINIMAL, "--train_steps=4000")
    with launched(*arguments) as launcher:
        until(lambda: any(map(has_gpu, tasks_of(launcher, "worker"))), "a worker on a GPU", SECS)
        assert tasks_of(launcher, "ps") and not any(map(has_gpu, tasks_of(launcher, "ps")))
        said, _ = launcher.communicate(timeout=SECS)
    assert launcher.returncode == 0 and "Test-Accuracy" in said, said
    assert "worker 0 computes on GPU:0" in said, said


def test_workers_share_one_gpu() -> None:
    """Two workers of one GPU take a part of its memory each, and both train."""
    command = ("harness.launch", "--ps=1", "--workers=2", "--", *MINIMAL, "--train_steps=500")
    said = run(sys.executable, "-m", *command, CUDA_VISIBLE_DEVICES=GPUS[0])
    assert said.count("(45% of its memory)") == 2 and "Test-Accuracy" in said, said


def test_killed_worker_leaves_its_memory() -> None:
    """A worker that is killed leaves its memory to the next one, which takes three quarters of the GPU."""
    arguments = ("--ps=1", "--workers=1", "--require_gpu", "--", *MINIMAL, "--train_steps=4000")
    with launched(*arguments) as launcher:
        until(lambda: any(map(has_gpu, tasks_of(launcher, "worker"))), "a worker on a GPU", SECS)
        for process in tasks_of(launcher, "worker"):
            process.send_signal(signal.SIGKILL)
        said, _ = launcher.communicate(timeout=SECS)
    assert launcher.returncode == 0 and "Test-Accuracy" in said, said
    assert said.count("worker 0 computes on GPU:0") == 2, said


def test_checkpoint_moves_between_devices(tmp_path: pathlib.Path) -> None:
    """A checkpoint of a GPU is restored on the CPU, and the next one on the GPU again."""
    for steps, platforms in (100, ""), (200, "cpu"), (300, ""):
        changes = {"JAX_PLATFORMS": platforms} if platforms else {}
        said = run(*TRAINER, f"--logdir={tmp_path}", f"--train_steps={steps}", **changes)
        assert f"step {steps}/{steps}" in said, said
        assert ("chief: initialise" in said) == (steps == 100), said


def test_out_of_memory_loses_no_variable() -> None:
    """A step that is too large for the GPU names the cure, and the variables keep their values."""
    with rt.Graph().as_default(), rt.Session() as session:
        w = rt.Variable(np.float32(3.0), name="w")
        x = rt.placeholder(jnp.float32, [None], name="x")
        loss = rt.call(lambda w, x: w * jnp.sort(jnp.outer(x, x), 0)[-1].sum(), w, x)
        train = w.assign_sub(0.0 * loss)
        session.run(rt.global_variables_initializer())
        with pytest.raises(rt.ResourceExhaustedError, match="no variable has lost its value"):
            session.run(train.op, {x: np.ones(1 << 19, np.float32)})
        assert session.run(w) == 3.0


def add_one(a: jax.Array) -> jax.Array:
    """Adds one by a Pallas kernel that Triton compiles."""

    def kernel(source: Any, target: Any) -> None:
        target[...] = source[...] + 1

    added: jax.Array = pallas.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(a.shape, a.dtype),
        compiler_params=triton.CompilerParams(),
    )(a)
    return added


def attend(a: jax.Array) -> jax.Array:
    """Attends by cuDNN."""
    attended: jax.Array = jax.nn.dot_product_attention(a, a, a, implementation="cudnn")
    return attended


KERNELS = {
    "cudnn attention": (attend, (2, 128, 4, 64), jnp.bfloat16),
    "pallas by triton": (add_one, (64, 64), jnp.float32),
    "ffi of cusolver": (lambda a: jnp.linalg.cholesky(a @ a.T + jnp.eye(8)), (8, 8), jnp.float32),
}


@pytest.mark.parametrize("name", KERNELS)
def test_own_kernel_runs(name: str) -> None:
    """A kernel that only a GPU has gives in a step what it gives in plain JAX."""
    compute, shape, dtype = KERNELS[name]
    given = np.random.default_rng(0).normal(size=shape).astype(dtype)
    with rt.Graph().as_default(), rt.Session() as session:
        found = session.run(rt.call(compute, rt.constant(given)))
    wanted = np.asarray(jax.jit(compute)(given))
    np.testing.assert_array_equal(np.asarray(found), wanted)


def test_towers_match_tensorflow() -> None:
    """Four towers on the GPUs that there are give the numbers of TensorFlow."""
    record = ROOT / "tests" / "harness" / "tf1" / "oracle" / "tensorflow_2_21.json"
    wanted = json.loads(record.read_text())["programs"]["towers_on_missing_gpus"]
    with tf.Graph().as_default():
        found = programs.four_towers(tf)
    for step, values in zip(found, wanted, strict=True):
        values = values if isinstance(values, list) else [values]
        told = np.ravel(np.asarray(step, np.float64))
        np.testing.assert_allclose(told, np.concatenate([v["values"] for v in values]), rtol=1e-4)


LIMIT = """
import jax
import harness.tf1 as tf
options = tf.GPUOptions(allow_growth=True, per_process_gpu_memory_fraction=0.25)
with tf.device("/gpu:0"):
    x = tf.constant([1.0, 2.0]) * 2.0
with tf.Session(config=tf.ConfigProto(gpu_options=options)) as session:
    assert session.run(x).tolist() == [2.0, 4.0]
print("limit", jax.local_devices()[0].memory_stats()["bytes_limit"])
"""


def test_gpu_options_bound_memory() -> None:
    """``per_process_gpu_memory_fraction`` bounds the memory of a process."""
    asked = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
    total = int(run(*asked, f"--id={GPUS[0]}").split()[0]) << 20
    said = run(sys.executable, "-c", LIMIT, CUDA_VISIBLE_DEVICES=GPUS[0], PYTHONPATH=str(ROOT))
    assert 0.2 < int(said.rpartition("limit ")[2]) / total < 0.26
