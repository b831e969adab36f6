"""How the driver and the processes of a measured system talk: lines on standard input and output.

A worker prints READY when it is warm, waits for a line, trains for the seconds given on that line,
and prints one JSON object with the steps it did. Nothing here imports a framework: peers run in an
environment of their own.
"""

import json
import sys
import time
from collections.abc import Callable

import numpy as np

INPUTS, CLASSES, BATCH = 784, 10, 100
ROWS, DIM, IDS = 1_000_000, 32, 100_000
"""The table of `benchmarks.tables`: its rows, their length, and the ids of a step."""


def batches(seed: int, count: int = 16) -> list[tuple[np.ndarray, np.ndarray]]:
    """A few fixed batches: images float32 [100, 784] in 0..1 and labels int32 [100], 64-byte aligned."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        memory = np.empty(BATCH * INPUTS * 4 + 64, np.uint8)
        start = -memory.ctypes.data % 64
        images = memory[start : start + BATCH * INPUTS * 4].view(np.float32).reshape(BATCH, INPUTS)
        images[...] = rng.random((BATCH, INPUTS), np.float32)
        made.append((images, rng.integers(0, CLASSES, BATCH).astype(np.int32)))
    return made


def id_batches(count: int = 8) -> list[tuple[np.ndarray, np.ndarray]]:
    """A few fixed batches: ids int64 [100,000] by Zipf's law with exponent 1.2, and gradients of their rows."""
    rng = np.random.default_rng(0)
    # The rank of an id says nothing about its place in the table.
    place = rng.permutation(ROWS)
    ids = [place[rng.zipf(1.2, IDS) % ROWS] for _ in range(count)]
    return [(i, rng.standard_normal((IDS, DIM), np.float32)) for i in ids]


def initial(hidden: int) -> dict[str, np.ndarray]:
    """The initial parameters of the 784-H-10 MLP."""
    rng = np.random.default_rng(0)
    return {
        "w1": (rng.standard_normal((INPUTS, hidden)) / INPUTS**0.5).astype(np.float32),
        "b1": np.zeros(hidden, np.float32),
        "w2": (rng.standard_normal((hidden, CLASSES)) / hidden**0.5).astype(np.float32),
        "b2": np.zeros(CLASSES, np.float32),
    }


def measure(
    step: Callable[[np.ndarray, np.ndarray], object],
    seed: int,
    warmup: int = 30,
    data: list[tuple[np.ndarray, np.ndarray]] | None = None,
) -> None:
    """Warms up, tells the driver, waits for its word, and counts the steps of the seconds it asks for."""
    data = batches(seed) if data is None else data
    for i in range(warmup):
        step(*data[i % len(data)])
    print("READY", flush=True)
    for line in sys.stdin:
        seconds = float(line)
        done = 0
        started = time.perf_counter()
        end = started + seconds
        while time.perf_counter() < end:
            step(*data[done % len(data)])
            done += 1
        print(json.dumps({"steps": done, "seconds": time.perf_counter() - started}), flush=True)
