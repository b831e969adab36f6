"""The small model whose checkpoints are kept: every kind of variable there is, with the values that it has in them.

What it makes must stay as it is: the checkpoints of earlier versions hold it.
"""

import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import optax

import harness
import runtime as rt

ROWS = 7
WORDS = np.array(["", "wort", "слово", b"\x00\xff"], object)
TABLE = np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3) / 4
KERNEL = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
HALF = np.array([0.5, -2.0, 3.0], ml_dtypes.bfloat16)
FLAGS = np.array([True, False])
STATE = {
    "epoch": 2,
    "order": np.arange(4, dtype=np.int16),
    "key": b"\x01",
    "nested": [1.5, None, {"name": "x"}],
}
STEPS = 3
"""So many steps of training were done."""


def build(ps: int, parts: int) -> tuple[rt.Variable, rt.Operation]:
    """The model, its table in so many parts over so many ps; gives the global step and the training operation."""
    with rt.device("/job:ps/task:0"):
        global_step = harness.get_or_create_global_step()
        rt.Variable(WORDS, name="words")
        rt.Variable(HALF, name="half", trainable=False)
    with rt.device(f"/job:ps/task:{ps - 1}"):
        kernel = rt.Variable(KERNEL, name="net/kernel")
        rt.Variable(FLAGS, name="flags", trainable=False)
    pieces = np.array_split(TABLE, parts)
    table = []
    for number, piece in enumerate(pieces):
        with rt.device(f"/job:ps/task:{number % ps}"):
            table.append(rt.Variable(piece, name=f"table/part_{number}"))
    harness.partitioned("table", table)
    loss = rt.call(_loss, kernel, *table)
    # Plain addition, so that each value is the same whatever computes it.
    train_op = harness.Optimizer(optax.sgd(0.5, momentum=0.5)).minimize(
        loss, global_step=global_step
    )
    return global_step, train_op


def _loss(kernel: Any, *table: Any) -> Any:
    return kernel.sum() + sum(part.sum() for part in table)


def expected() -> dict[str, Any]:
    """What a checkpoint of the model holds after ``STEPS`` steps: gradients are 1, so all is exact."""
    momentum = np.float32(1.75)  # 1, 1.5, 1.75
    moved = np.float32(0.5 * (1 + 1.5 + 1.75))
    return {
        "global_step": np.int64(STEPS),
        "words": np.array(
            [word.encode() if isinstance(word, str) else word for word in WORDS], object
        ),
        "half": HALF,
        "flags": FLAGS,
        "net/kernel": KERNEL - moved,
        "table": TABLE - moved,
        "net/kernel/trace/trace": np.full_like(KERNEL, momentum),
        "table/trace/trace": np.full_like(TABLE, momentum),
    }


def save(directory: pathlib.Path) -> None:
    """Trains on 2 ps and leaves a checkpoint in the directory."""
    harness.checkpointable("input", lambda: STATE, lambda state: None, task="/job:worker/task:0")
    with rt.Graph().as_default(), rt.local_cluster(ps=2, workers=1) as cluster:
        with cluster.device():
            global_step, train_op = build(ps=2, parts=3)
        supervisor = harness.Supervisor(
            logdir=directory, global_step=global_step, summary_op=None, save_model_secs=0
        )
        with supervisor.managed_session(cluster.target) as session:
            for _ in range(STEPS):
                session.run(train_op)
    harness.forget_checkpointable("input", task="/job:worker/task:0")
