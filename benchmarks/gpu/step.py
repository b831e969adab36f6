"""A training step of one worker, and its copies as the profiler of CUDA counts them.

    python -m harness.launch --ps=2 --workers=1 -- \
        python -m benchmarks.gpu.step --layers=80 --width=64 --prefetch=0

Prints a line of JSON. On a CPU there are no copies to count.
"""

import argparse
import collections
import gzip
import json
import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import harness
import runtime as rt

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--width", type=int, default=64, help="Units of each layer.")
parser.add_argument("--prefetch", type=int, default=0)
parser.add_argument("--steps", type=int, default=30, help="Steps that are timed.")

BATCH = 256
WARM, TRACED = 5, 10
KINDS = ("MemcpyH2D", "MemcpyD2H", "MemcpyD2D")


def count_copies(trace: pathlib.Path) -> dict[str, dict[str, float]]:
    """Returns copies, and microseconds of copies, of a step by their kind."""
    copies, micros = collections.Counter[str](), collections.Counter[str]()
    for path in trace.rglob("*.trace.json.gz"):
        with gzip.open(path) as file:
            for event in json.load(file)["traceEvents"]:
                if (kind := event.get("name", "")[:9]) in KINDS:
                    copies[kind] += 1
                    micros[kind] += event.get("dur", 0)
    return {
        "copies_a_step": {kind: count / TRACED for kind, count in copies.items()},
        "copy_us_a_step": {kind: round(us / TRACED) for kind, us in micros.items()},
    }


def loss_fn(params: dict[str, jax.Array], key: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the mean square of a deep network's results, with dropout."""
    for i in range(len(params) // 2):
        x = jnp.tanh(x @ params[f"w{i}"] + params[f"b{i}"])
    return ((x * jax.random.bernoulli(key, 0.9, x.shape)) ** 2).mean()


def main(options: argparse.Namespace, others: list[str]) -> None:
    """Serves as a ps, or measures as a worker."""
    with harness.join_cluster(others) as me:
        layers, width = range(options.layers), options.width
        with me.device():
            global_step = harness.get_or_create_global_step()
            weights = {f"w{i}": np.eye(width, dtype=np.float32) for i in layers}
            biases = {f"b{i}": np.zeros(width, np.float32) for i in layers}
            params = rt.variables(weights | biases, name="net")
            x = rt.placeholder(jnp.float32, [None, width], name="x")
            loss = rt.call(loss_fn, params, rt.random_key(), x, name="loss")
            train = harness.Optimizer(optax.sgd(1e-3)).minimize(loss, global_step=global_step)
        supervisor = harness.Supervisor(is_chief=me.is_chief, logdir=None, global_step=global_step)
        feeds = {x: np.ones((BATCH, width), np.float32)}
        config = rt.SessionConfig(prefetch=options.prefetch)
        with supervisor.managed_session(me.target, config=config) as session:
            for _ in range(WARM):
                session.run([train, loss], feeds)
            began = time.perf_counter()
            for _ in range(options.steps):
                session.run([train, loss], feeds)
            secs = (time.perf_counter() - began) / options.steps
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    for _ in range(TRACED):
                        session.run([train, loss], feeds)
                counted = count_copies(pathlib.Path(folder))
        device = jax.local_devices()[0]
        figures = {
            "device": device.device_kind,
            "variables": 2 * options.layers,
            "MB": round(options.layers * width * width * 4 / 1e6, 1),
            "prefetch": options.prefetch,
            "ms_a_step": round(secs * 1e3, 2),
            **counted,
            "device_peak_MB": (device.memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e6,
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(*parser.parse_known_args())
