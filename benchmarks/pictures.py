"""Runs what the pages show a picture of, and draws it: ``python -m benchmarks.pictures kills`` (images, stopping).

What a run gave is kept as ``benchmarks/results/NAME.json`` and drawn into ``docs/images/NAME.svg``; ``--draw`` draws
again what is kept. Drawing needs matplotlib, which the peers' environment has: ``.venv-bench/bin/python
benchmarks/pictures.py kills --draw`` needs nothing of this project.
"""

import argparse
import json
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
KILLS = ("worker/1", "ps/0", "worker/0")
"""The tasks that get SIGKILL, each when training has gone on for some seconds since the one before."""
TRAIN_SECS = 6.0
NAMES = {"worker/1": "a worker is killed", "ps/0": "the ps is killed", "worker/0": "the chief is killed"}
BLUE, ORANGE, RED, GREY = "#1b6ca8", "#e58e26", "#b33939", "#777777"


def launch(*command: str, evaluators: int = 0) -> "subprocess.Popen[str]":
    """Starts a program on 1 ps and 2 workers by ``harness.launch``; its output can be read."""
    launcher = [sys.executable, "-m", "harness.launch", "--ps=1", "--workers=2", f"--evaluators={evaluators}", "--"]
    return subprocess.Popen(
        [*launcher, sys.executable, "-m", *command],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def kills() -> dict[str, Any]:
    """MNIST, asynchronously, while three tasks are killed: the global step and the accuracy of checkpoints by time."""
    with tempfile.TemporaryDirectory() as logdir:
        flags = ["--flagfile=configs/mnist_async.flags", f"--logdir={logdir}", "--save_model_secs=1", "--epochs=40"]
        with launch("models.mnist.trainer", *flags, evaluators=1) as run:
            lines: list[str] = []
            reader = threading.Thread(target=lambda: lines.extend(run.stdout or ()))
            reader.start()
            steps, killed, begun = _watch(run)
            reader.join()
        assert run.returncode == 0, "".join(lines[-30:])
        told = json.loads((pathlib.Path(logdir) / "eval" / "evaluations.json").read_text())["evaluations"]
    evaluations = [[e["saved_at"] - begun, e["metrics"]["accuracy"]] for e in told if e["step"]]
    log = [line.rstrip() for line in lines if re.search("recover|restart|start.* again|killed|Test-Accuracy", line)]
    return {"steps": steps, "accuracy": sorted(evaluations), "killed": killed, "log": log}


def _watch(run: "subprocess.Popen[str]") -> tuple[list[list[float]], list[list[Any]], float]:
    """Notes the global step of the ps twenty times a second, and kills; until the launcher ends."""
    import psutil

    import runtime as rt

    begun, steps, killed, left = 0.0, list[list[float]](), list[list[Any]](), list(KILLS)
    reached, since = 0.0, 0.0  # the step at the last kill, and since when training has been beyond it
    while run.poll() is None:
        tasks = _tasks(psutil.Process(run.pid))
        ps = tasks.get("ps/0")
        try:
            step = rt.probe(ps[1], 1.0).values.get("global_step") if ps else None
        except rt.OpError:
            step = None
        now = time.time()
        if step and not begun:
            begun = now
        if begun and step is not None:
            steps.append([round(now - begun, 3), step])
        if step is not None and step > reached and not since:
            since = now
        if left and since and now - since >= TRAIN_SECS and left[0] in tasks:
            name = left.pop(0)
            tasks[name][0].send_signal(signal.SIGKILL)
            killed.append([round(now - begun, 3), name])
            reached, since = steps[-1][1], 0.0
        time.sleep(0.05)
    assert not left, f"training was over before {left} were killed"
    return steps, killed, begun


def _tasks(launcher: Any) -> dict[str, tuple[Any, str]]:
    """The processes of the tasks that live, and the addresses of the tasks."""
    import psutil

    found = {}
    for process in launcher.children(recursive=True):
        try:
            given = dict(re.findall(r"--(\w+)=(\S+)", " ".join(process.cmdline())))
        except psutil.Error:
            continue
        if "job_name" in given:
            job, index = given["job_name"], int(given["task_index"])
            hosts = given.get(f"{job}_hosts", "").split(",")
            found[f"{job}/{index}"] = process, hosts[index] if index < len(hosts) else ""
    return found


def images() -> dict[str, Any]:
    """The accuracy of the Flax example by steps."""
    with tempfile.TemporaryDirectory() as logdir, launch("models.images.trainer", f"--logdir={logdir}") as run:
        output = run.communicate()[0]
    assert run.returncode == 0, output[-3000:]
    return {"accuracy": [[int(s), float(a)] for s, a in re.findall(r"step (\d+): accuracy ([\d.]+)", output)]}


def stopping() -> dict[str, Any]:
    """The loss of the early-stopping example on images that are not trained on, by steps."""
    with tempfile.TemporaryDirectory() as logdir:
        with launch("models.early_stopping.trainer", f"--logdir={logdir}", evaluators=1) as run:
            output = run.communicate()[0]
        assert run.returncode == 0, output[-3000:]
    found = re.findall(r"step (\d+): loss ([\d.]+), accuracy ([\d.]+)", output)
    (best,) = re.findall(r"Best-Step: (\d+)", output)
    ended = max(int(step) for step in re.findall(r"training ended at step (\d+)", output))
    return {"loss": [[int(s), float(x)] for s, x, _ in found], "best": int(best), "ended": ended}


def draw_kills(found: dict[str, Any], plt: Any) -> None:
    """The global step and the accuracy by time, one above the other, with the kills as lines."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 4.6), sharex=True, height_ratios=(3, 2))
    times, steps = zip(*found["steps"], strict=True)
    above.plot(times, steps, color=BLUE, linewidth=1.6)
    above.set_ylabel("global step")
    below.plot(*zip(*found["accuracy"], strict=True), color=ORANGE, marker="o", markersize=3, linewidth=1.2)
    below.set_ylabel("test accuracy")
    below.set_xlabel("seconds since the first step")
    for number, (at, name) in enumerate(found["killed"]):
        for panel in (above, below):
            panel.axvline(at, color=RED, linewidth=1, linestyle="--")
        above.text(at + 0.3, max(steps) * (0.98 - 0.14 * number), NAMES[name], color=RED, va="top")
    below.set_ylim(0.9, 1.0)
    figure.align_ylabels()


def draw_images(found: dict[str, Any], plt: Any) -> None:
    """One line."""
    _, panel = plt.subplots(figsize=(6, 3))
    panel.plot(*zip(*found["accuracy"], strict=True), color=BLUE, marker="o", markersize=3)
    panel.set_xlabel("step, of two workers together")
    panel.set_ylabel("test accuracy")


def draw_stopping(found: dict[str, Any], plt: Any) -> None:
    """One line, with the best checkpoint and the end."""
    _, panel = plt.subplots(figsize=(6, 3))
    later = [[step, loss] for step, loss in found["loss"] if step > 100]
    panel.plot(*zip(*later, strict=True), color=BLUE, marker="o", markersize=3)
    best = dict(map(tuple, found["loss"]))[found["best"]]
    panel.plot([found["best"]], [best], "o", color=ORANGE, markersize=8)
    panel.annotate("the best, kept", (found["best"], best), (8, -4), textcoords="offset points", color=ORANGE)
    panel.axvline(found["ended"], color=RED, linewidth=1, linestyle="--")
    panel.text(found["ended"], min(loss for _, loss in later), "the evaluator\nends training ", color=RED, ha="right")
    panel.set_xlabel("global step")
    panel.set_ylabel("loss on unseen images")


RUNS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any], Any], None]]] = {
    "kills": (kills, draw_kills),
    "images": (images, draw_images),
    "stopping": (stopping, draw_stopping),
}


def draw(name: str) -> None:
    """Draws what a run gave."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": name, "axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    RUNS[name][1](json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text()), plt)
    plt.tight_layout()
    plt.savefig(ROOT / "docs" / "images" / f"{name}.svg", metadata={"Date": None})


def main() -> None:
    """Runs, keeps and draws."""
    parser = argparse.ArgumentParser(description="Runs what the pages show, and draws it.")
    parser.add_argument("name", choices=RUNS)
    parser.add_argument("--draw", action="store_true", help="draw what is kept of the last run")
    options = parser.parse_args()
    if not options.draw:
        found = json.dumps(RUNS[options.name][0]())
        (ROOT / "benchmarks" / "results" / f"{options.name}.json").write_text(found + "\n")
    draw(options.name)


if __name__ == "__main__":
    main()
