"""What a checkpoint costs: time blocked, step times during the save, memory, bytes per second beside dd, Orbax and TF.

One worker trains (each step adds to a small variable on every ps) while its chief saves a large model. Rates are the
best of three, because a disk that others use is slow at times. Plain Orbax saves and restores the same arrays in one
process; TensorFlow's Saver, where .venv-bench has it, the same variables on as many ps. Run from the checkout;
`--save` writes benchmarks/results/checkpoint.json:

    python -m benchmarks.checkpoint --ps=1,2 --mb=512 --systems=ours,orbax,tf
"""

import contextlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
from absl import app, flags

from benchmarks.common import PEERS_PYTHON, ROOT
from harness.launch.ports import free_ports

_PS = flags.DEFINE_list("ps", ["1", "2"], "Numbers of ps.")
_MB = flags.DEFINE_integer("mb", 512, "Size of the model in MiB, in arrays of 32 MiB.", lower_bound=64)
_SAVES = flags.DEFINE_integer("saves", 5, "How many saves.", lower_bound=1)
_TOUCHED_KB = flags.DEFINE_integer("touched_kb", 1024, "Size in KiB of the variable that each step updates on each ps.")
_DIR = flags.DEFINE_string("dir", "", "Where to write; a temporary directory by default.")
_SYSTEMS = flags.DEFINE_list("systems", ["ours", "orbax", "tf"], "What to measure: ours, stream, orbax (and dd), tf.")
_SAVE = flags.DEFINE_bool("save", False, "Write the results to benchmarks/results/checkpoint.json.")
_JSON = flags.DEFINE_bool("json", False, "Print JSON instead of a table.")

ARRAY_BYTES = 32 << 20
RESULTS = ROOT / "benchmarks" / "results" / "checkpoint.json"
_SERVE = "import json, sys, runtime as rt; rt.Server(json.loads(sys.argv[1]), 'ps', int(sys.argv[2])).join()"


@contextlib.contextmanager
def _ps_processes(cluster: dict[str, list[str]]) -> Iterator[list[psutil.Process]]:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "MALLOC_MMAP_THRESHOLD_": "1048576",
    }
    started = [
        subprocess.Popen([sys.executable, "-c", _SERVE, json.dumps(cluster), str(i)], env=environment, cwd=ROOT)
        for i in range(len(cluster["ps"]))
    ]
    try:
        yield [psutil.Process(p.pid) for p in started]
    finally:
        for p in started:
            p.kill()
            p.wait()


class _Peak:
    """The largest resident size of some processes together while it is measured."""

    def __init__(self, processes: list[psutil.Process]) -> None:
        self._processes = processes
        self._stop = threading.Event()
        self.peak = self.now()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def now(self) -> int:
        """Resident bytes now."""
        return sum(p.memory_info().rss for p in self._processes)

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.peak = max(self.peak, self.now())

    def end(self) -> int:
        """Stops measuring and gives the peak in bytes."""
        self._stop.set()
        self._thread.join()
        return self.peak


def measure(ps: int, directory: pathlib.Path, transfer: str = "shared") -> dict[str, Any]:
    """Saves and restores a model on so many ps while a worker trains."""
    import harness
    import runtime as rt

    ports = iter(free_ports(ps + 1))
    cluster = {"ps": [f"127.0.0.1:{next(ports)}" for _ in range(ps)], "worker": [f"127.0.0.1:{next(ports)}"]}
    count = max(ps, (_MB.value << 20) // ARRAY_BYTES)
    with _ps_processes(cluster) as processes, rt.Server(cluster, "worker", 0) as server, rt.Graph().as_default():
        large, touched = [], []
        for i in range(count):
            with rt.device(f"/job:ps/task:{i % ps}"):
                large.append(rt.Variable(lambda: rt.random.normal(rt.random_key(), (ARRAY_BYTES // 4,)), name=f"w{i}"))
        for i in range(ps):
            with rt.device(f"/job:ps/task:{i}"):
                touched.append(rt.Variable(np.zeros(_TOUCHED_KB.value * 256, np.float32), name=f"t{i}"))
        with rt.device("/job:ps/task:0"):
            step = rt.Variable(0, dtype=np.int64, name="global_step", trainable=False)
        train = rt.group(*[t.assign_add(np.ones(t.shape, np.float32)).op for t in touched], step.assign_add(1).op)
        with rt.Session(server.target) as sess:
            sess.run(rt.global_variables_initializer())
            saver = harness.Saver(max_to_keep=1, transfer=transfer)
            found = _measure(sess, saver, train, step, directory / "m", processes)
            return {"system": "ours" if transfer == "shared" else "stream", **found}


def _measure(
    sess: Any, saver: Any, train: Any, step: Any, path: pathlib.Path, processes: list[psutil.Process]
) -> dict[str, Any]:
    quiet, busy, blocked, paused, save_secs, extra = [], [], [], [], [], []

    def run() -> float:
        began = time.perf_counter()
        sess.run(train)
        return time.perf_counter() - began

    for _ in range(50):
        run()
    saver.save(sess, path, step)  # imports Orbax, opens files
    for _ in range(_SAVES.value):
        until = time.perf_counter() + 1.0
        while time.perf_counter() < until:
            quiet.append(run())
        before = _Peak(processes)
        base = before.end()
        peak = _Peak(processes)
        began = time.perf_counter()
        handle = saver.save(sess, path, step, wait=False)
        while not handle.done():
            busy.append(run())
        save_secs.append(time.perf_counter() - began)
        extra.append(peak.end() - base)
        handle.result()
        blocked.append(handle.blocked_secs)
        paused.append(handle.paused_secs)
    alone = []
    for _ in range(3):
        began = time.perf_counter()
        newest = saver.save(sess, path, step)
        alone.append(time.perf_counter() - began)
    restored = []
    for _ in range(3):
        began = time.perf_counter()
        saver.restore(sess, newest)
        restored.append(time.perf_counter() - began)
    size = sum(p.stat().st_size for p in pathlib.Path(newest).rglob("*") if p.is_file())
    return {
        "ps": len(processes),
        "mb": round(size / 2**20),
        "blocked_ms_p50": _ms(blocked),
        "blocked_ms_max": round(max(blocked) * 1e3, 2),
        "paused_ms_p50": _ms(paused),
        "step_ms_p50_quiet": _ms(quiet),
        "step_ms_p50_saving": _ms(busy),
        "rate_while_saving": round(statistics.median(quiet) / statistics.median(busy), 3),
        "mean_rate_while_saving": round(statistics.fmean(quiet) / statistics.fmean(busy), 3),
        "extra_mb": round(max(extra) / 2**20),
        "save_gb_s_training": round(size / statistics.median(save_secs) / 1e9, 2),
        "save_gb_s": round(size / min(alone) / 1e9, 2),
        "restore_gb_s": round(size / min(restored) / 1e9, 2),
    }


def _ms(secs: list[float]) -> float:
    return round(statistics.median(secs) * 1e3, 3)


def plain(directory: pathlib.Path) -> dict[str, Any]:
    """What dd and plain Orbax do with as many bytes."""
    import orbax.checkpoint as ocp
    from absl import logging

    logging.set_verbosity(logging.WARNING)

    count = (_MB.value << 20) // ARRAY_BYTES
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.standard_normal(ARRAY_BYTES // 4, np.float32) for i in range(count)}
    size = count * ARRAY_BYTES
    found: dict[str, Any] = {"system": "orbax", "mb": size >> 20}
    dd = []
    for _ in range(3):
        began = time.perf_counter()
        command = ["dd", "if=/dev/zero", f"of={directory}/dd", "bs=4M", f"count={size >> 22}", "conv=fsync"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        dd.append(time.perf_counter() - began)
    found["dd_gb_s"] = round(size / min(dd) / 1e9, 2)
    for name, compressed in (("", True), ("uncompressed_", False)):
        handler = ocp.PyTreeCheckpointHandler(use_compression=compressed)
        options = ocp.CheckpointManagerOptions(max_to_keep=1)  # as our Saver: the deletion is in the time
        with ocp.CheckpointManager(directory / "orbax", item_handlers=handler, options=options) as manager:
            saves, restores = [], []
            for i in range(3):
                began = time.perf_counter()
                manager.save(i, args=ocp.args.PyTreeSave(arrays))
                manager.wait_until_finished()
                saves.append(time.perf_counter() - began)
            for _ in range(3):
                began = time.perf_counter()
                manager.restore(2, args=ocp.args.PyTreeRestore())
                restores.append(time.perf_counter() - began)
        shutil.rmtree(directory / "orbax")
        found[f"{name}save_gb_s"] = round(size / min(saves) / 1e9, 2)
        found[f"{name}restore_gb_s"] = round(size / min(restores) / 1e9, 2)
    return found


def tensorflow(ps: int, directory: pathlib.Path) -> dict[str, Any]:
    """What TensorFlow's Saver does with the same variables on as many ps."""
    ports = [f"127.0.0.1:{port}" for port in free_ports(ps + 1)]
    cluster = json.dumps({"ps": ports[:ps], "worker": ports[ps:]})
    options = {"mb": _MB.value, "touched_kb": _TOUCHED_KB.value, "saves": _SAVES.value, "directory": str(directory)}

    def command(job: str, index: int) -> list[str]:
        program = str(ROOT / "benchmarks" / "systems" / "checkpoint_tf.py")
        return [str(PEERS_PYTHON), program, job, str(index), cluster, json.dumps(options)]

    serving = [subprocess.Popen(command("ps", i), stderr=subprocess.DEVNULL) for i in range(ps)]
    try:
        done = subprocess.run(command("worker", 0), check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    finally:
        for p in serving:
            p.kill()
            p.wait()


def main(argv: list[str]) -> None:
    """Measures and prints."""
    del argv
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as temporary:
        directory = pathlib.Path(_DIR.value or temporary)
        results = []
        for system in _SYSTEMS.value:
            if system == "tf" and not PEERS_PYTHON.exists():
                print("tf is left out: make bench-setup makes the environment that has it", file=sys.stderr)
                continue
            for ps in _PS.value if system != "orbax" else ["0"]:
                where = directory / f"{system}{ps}"
                where.mkdir(parents=True)
                results.append(_RUN[system](int(ps), where))
                shutil.rmtree(where)  # so that no page of it is in the way of the next one
    for result in results:
        print(json.dumps(result) if _JSON.value else "  ".join(f"{k}={v}" for k, v in result.items()))
    if _SAVE.value:
        machine = {"cores": os.cpu_count(), "memory_gb": round(psutil.virtual_memory().total / 1e9)}
        RESULTS.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


_RUN: dict[str, Callable[[int, pathlib.Path], dict[str, Any]]] = {
    "ours": measure,
    "stream": lambda ps, directory: measure(ps, directory, "stream"),
    "orbax": lambda _, directory: plain(directory),
    "tf": tensorflow,
}


if __name__ == "__main__":
    app.run(main)
