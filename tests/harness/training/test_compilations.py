"""Start-up, counted instead of timed: what is imported, and that a second start compiles nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

HEAVY = ("orbax", "tensorstore", "tensorboardX", "tensorboard", "optax", "matplotlib", "scipy", "tqdm")
TRAINER = """
import json, sys
import jax, jax.numpy as jnp
import numpy as np
import harness
import runtime as rt

counts = {"cache_hits": 0, "cache_misses": 0}

def note(event, **_):
    name = event.rpartition("/")[2]
    if event.startswith("/jax/compilation_cache/") and name in counts:
        counts[name] += 1

jax.monitoring.register_event_listener(note)
directory = harness.keep_compilations(sys.argv[1])
server = rt.Server.create_local_server()
w = rt.Variable(np.ones((3, 4), np.float32), name="w")
x = rt.placeholder(jnp.float32, [None, 3])
loss = rt.call(lambda w, x: jnp.sum((x @ w) ** 2), w, x)
step = rt.assign_sub(w, 0.1 * rt.gradients(loss, [w])[0])
with rt.Session(server.target) as session:
    session.run(rt.global_variables_initializer())
    for _ in range(3):
        value = session.run([step, loss], {x: np.ones((2, 3), np.float32)})[1]
server.stop()
print(json.dumps({**counts, "directory": directory, "loss": float(value)}))
"""


def _python(code: str, *arguments: str, **environment: str) -> str:
    known = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**known, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", ["runtime", "harness.monitoring"])
def test_a_ps_imports_nothing_that_it_does_not_need(package: str) -> None:
    code = f"import {package}, sys; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    assert _python(code).split() == []


def test_the_launcher_starts_without_jax() -> None:
    assert _python("import harness.launch, sys; print('jax' in sys.modules, 'numpy' in sys.modules)") == "False False\n"


def test_a_second_start_compiles_nothing_wherever_the_directory_lies(tmp_path: Path) -> None:
    first = json.loads(_python(TRAINER, str(tmp_path / "first")))
    assert first["cache_misses"] > 0
    assert Path(first["directory"]).is_relative_to(tmp_path / "first")
    shutil.move(tmp_path / "first", tmp_path / "second")
    second = json.loads(_python(TRAINER, str(tmp_path / "second")))
    assert second["cache_misses"] == 0
    assert second["cache_hits"] == first["cache_misses"]
    assert second["loss"] == first["loss"]


def test_a_cache_that_jax_was_given_stays(tmp_path: Path) -> None:
    given = str(tmp_path / "given")
    found = json.loads(_python(TRAINER, str(tmp_path / "logdir"), JAX_COMPILATION_CACHE_DIR=given))
    assert found["directory"] == given
    assert not (tmp_path / "logdir").exists()


def test_what_is_damaged_is_compiled_again(tmp_path: Path) -> None:
    first = json.loads(_python(TRAINER, str(tmp_path)))
    for entry in Path(first["directory"]).iterdir():
        entry.write_bytes(entry.read_bytes()[:-40])
    again = json.loads(_python(TRAINER, str(tmp_path)))
    assert again["cache_hits"] == 0
    assert again["loss"] == first["loss"]
