"""Kills a chief or a ps with SIGKILL at random moments of saves, and looks at what is left behind.

Two ps and a chief that saves without pause. Every variable of version n is full of n, so a restored
value tells which version it is of. After each kill every visible checkpoint must be whole and of
the version in its name. Run from the checkout; a seed repeats the choice of victims and delays:

    python -m benchmarks.checkpoint_kills --kills=200
"""

import json
import multiprocessing
import multiprocessing.context
import os
import random
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from absl import app, flags

from tests.kit.ports import free_ports

_KILLS = flags.DEFINE_integer("kills", 200, "How many kills.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", None, "Seed of victims and delays; a random one by default.")
_KB = flags.DEFINE_integer("kb", 2048, "Size of each of the four variables, in KiB.", lower_bound=1)
_MAX_DELAY = flags.DEFINE_float(
    "max_delay", 0.6, "Kills come up to so many seconds after the first save begins."
)
_DIR = flags.DEFINE_string("dir", "", "Where the checkpoints go; a temporary directory by default.")

PS = 2
START_SECS = 60.0

Cluster = dict[str, list[str]]


def _serve(cluster: Cluster, index: int) -> None:
    import runtime as rt

    rt.Server(cluster, "ps", index).join()


def _lead(cluster: Cluster, directory: str, elements: int, pipe: Connection, rounds: int) -> None:
    """The chief: restores what there is, checks it, then trains and saves, so many times."""
    import runtime as rt

    try:
        _train(cluster, directory, elements, pipe, rounds)
    except rt.OpError as error:
        print(f"the chief ends: {error}", file=sys.stderr, flush=True)
        sys.exit(3)


def _train(cluster: Cluster, directory: str, elements: int, pipe: Connection, rounds: int) -> None:
    import harness
    import runtime as rt

    with rt.Server(cluster, "worker", 0) as server:
        with rt.Graph().as_default():
            variables = []
            for i in range(4):
                with rt.device(f"/job:ps/task:{i % PS}"):
                    variables.append(rt.Variable(np.zeros(elements, np.float32), name=f"v{i}"))
            with rt.device("/job:ps/task:0"):
                step = rt.Variable(np.int64(0), name="global_step", trainable=False)
            init = rt.global_variables_initializer()
            train = rt.group(
                *[v.assign_add(np.ones(elements, np.float32)) for v in variables],
                step.assign_add(1),
            )
            saver = harness.Saver(max_to_keep=2)
            with rt.Session(
                server.target, config=rt.SessionConfig(start_timeout_secs=START_SECS)
            ) as sess:
                restored = saver.restore_latest(sess, directory)
                if restored is None:
                    sess.run(init)
                else:
                    values = sess.run([step, *variables])
                    version = int(os.path.basename(restored))
                    good = all(np.all(np.asarray(v) == version) for v in values)
                    pipe.send(("restored", version, good))
                pipe.send(("saving", 0, True))
                for _ in range(rounds):
                    sess.run(train)
                    saver.save(sess, f"{directory}/model.ckpt", step)


def check(directory: str) -> tuple[int, list[str]]:
    """Returns the visible checkpoints of a directory, and their faults."""
    import harness
    from harness.checkpoints import layout

    paths = [step.path for step in layout.newest_first(directory)]
    wrong = []
    for path in paths:
        version = int(os.path.basename(path))
        try:
            reader = harness.load_checkpoint(path)
            for name in ("v0", "v1", "v2", "v3", "global_step"):
                value = reader.get_tensor(name)
                if not np.all(value == version):
                    wrong.append(f"{path}: {name} holds {np.unique(value)[:4]}")
        except Exception as error:
            wrong.append(f"{path}: {error}")
    return len(paths), wrong


def leftovers(directory: str) -> list[str]:
    """Returns the names in the series that are no finished checkpoint."""
    series = os.path.join(directory, "model.ckpt")
    return [n for n in os.listdir(series) if not n.isdigit()] if os.path.isdir(series) else []


class Run:
    """The cluster, and the record of its deaths."""

    def __init__(
        self, context: multiprocessing.context.ForkServerContext, directory: str, elements: int
    ) -> None:
        ports = iter(free_ports(PS + 1))
        self.cluster: Cluster = {
            "ps": [f"127.0.0.1:{next(ports)}" for _ in range(PS)],
            "worker": [f"127.0.0.1:{next(ports)}"],
        }
        self._context = context
        self._directory = directory
        self._elements = elements
        self.ps: list[Any] = [self._start_ps(i) for i in range(PS)]
        self.restores = 0
        self.bad_restores = 0

    def _start_ps(self, index: int) -> Any:
        process = self._context.Process(target=_serve, args=(self.cluster, index), daemon=True)
        process.start()
        return process

    def start_chief(self, rounds: int = 10**9) -> tuple[Any, Connection]:
        """Starts a chief that saves so many times. Returns it with the pipe of its reports."""
        mine, its = self._context.Pipe()
        arguments = (self.cluster, self._directory, self._elements, its, rounds)
        process = self._context.Process(target=_lead, args=arguments, daemon=True)
        process.start()
        its.close()
        return process, mine

    def restart_ps(self, index: int) -> None:
        """Starts a new ps in the place of a dead ps."""
        self.ps[index] = self._start_ps(index)

    def until(self, pipe: Connection, what: str) -> bool:
        """Waits for a report of the chief. Returns False if the chief died before."""
        deadline = time.monotonic() + START_SECS
        try:
            while pipe.poll(max(0.0, deadline - time.monotonic())):
                kind, version, good = pipe.recv()
                if kind == "restored":
                    self.restores += 1
                    if not good:
                        self.bad_restores += 1
                        print(f"restored values are not of version {version}", file=sys.stderr)
                if kind == what:
                    return True
        except (EOFError, ConnectionError):
            return False
        raise TimeoutError(f"the chief did not report {what!r} within {START_SECS:.0f} s")

    def stop(self) -> None:
        """Ends all ps."""
        for process in self.ps:
            process.kill()
            process.join()


def main(argv: list[str]) -> None:
    """Runs the kills. Returns 1 if a checkpoint was wrong, else 0."""
    del argv
    os.environ["JAX_PLATFORMS"] = "cpu"
    seed = random.SystemRandom().randrange(2**32) if _SEED.value is None else _SEED.value
    print(f"--seed={seed}", flush=True)
    rng = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["runtime", "harness.checkpoints.saver", "harness.checkpoints.orbax", "tensorstore"]
    )
    with tempfile.TemporaryDirectory() as temporary:
        directory = _DIR.value or temporary
        run = Run(context, directory, _KB.value * 256)
        try:
            report = _kill(run, rng, directory)
        finally:
            run.stop()
    report["seed"] = seed
    print(json.dumps(report))
    bad = report["wrong"] or report["bad_restores"] or report["leftovers_at_end"]
    sys.exit(1 if bad else 0)


def _kill(run: Run, rng: random.Random, directory: str) -> dict[str, Any]:
    started = time.monotonic()
    victims = {"chief": 0, "ps": 0}
    checked, unfinished, wrong = 0, 0, []
    for _ in range(_KILLS.value):
        chief, pipe = run.start_chief()
        if not run.until(pipe, "saving"):
            chief.join()
            raise RuntimeError("the chief died before its first save")
        time.sleep(rng.uniform(0.0, _MAX_DELAY.value))
        if rng.random() < 0.6:
            victims["chief"] += 1
            chief.kill()
            chief.join()
            if rng.random() < 0.3:  # a new chief beside living ps, or with new ps
                _restart_all(run)
        else:
            victims["ps"] += 1
            index = rng.randrange(PS)
            run.ps[index].kill()
            run.ps[index].join()
            chief.join(START_SECS)  # its save or its next step fails, and it ends
            if chief.is_alive():
                raise TimeoutError("the chief did not notice that a ps died")
            run.restart_ps(index)
        pipe.close()
        unfinished += bool(leftovers(directory))
        count, problems = check(directory)
        checked += count
        wrong += problems
        for problem in problems:
            print(problem, file=sys.stderr, flush=True)
    chief, pipe = run.start_chief(rounds=1)  # it cleans up what the dead ones left
    run.until(pipe, "saving")
    chief.join(START_SECS)
    pipe.close()
    if chief.exitcode != 0:
        wrong.append(f"the last chief ended with {chief.exitcode}")
    end = leftovers(directory)
    return {
        "kills": victims,
        "checkpoints_checked": checked,
        "wrong": len(wrong),
        "restores": run.restores,
        "bad_restores": run.bad_restores,
        "kills_that_left_something_unfinished": unfinished,
        "leftovers_at_end": end,
        "secs": round(time.monotonic() - started, 1),
    }


def _restart_all(run: Run) -> None:
    for index in range(PS):
        run.ps[index].kill()
        run.ps[index].join()
        run.restart_ps(index)


if __name__ == "__main__":
    app.run(main)
