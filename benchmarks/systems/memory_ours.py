"""A worker that trains every variable of a large model, for `benchmarks.memory`: commands and answers are lines.

READY comes first. Then `go` trains until `stop`, which answers with the number of steps; `save DIRECTORY` saves while
training goes on and answers with the seconds it took.
"""

import json
import queue
import sys
import threading
import time
from collections.abc import Callable

import jax
import numpy as np
import optax

import harness
import runtime as rt

RULES = {"sgd": optax.sgd(0.1), "momentum": optax.sgd(0.1, momentum=0.9), "adam": optax.adam(1e-3)}


def main(job: str, index: int, cluster_json: str, options_json: str) -> None:
    """Serves as a ps, or trains as a worker."""
    cluster, options = json.loads(cluster_json), json.loads(options_json)
    jax.config.update("jax_platforms", "cpu")
    server = rt.Server(cluster, job, index)
    if job == "ps":
        server.join()
        return
    elements = options["array_bytes"] // 4
    with rt.device(rt.replica_device_setter(cluster=cluster, worker_device=f"/job:worker/task:{index}")):
        step = rt.Variable(0, dtype=np.int64, name="global_step", trainable=False)
        weights = [
            rt.Variable(lambda: rt.random.normal(rt.random_key(), (elements,)), name=f"w{i}")
            for i in range(options["arrays"])
        ]
        x = rt.placeholder(np.float32, [], name="x")
        loss = rt.call(lambda ws, x: sum(((w - x) ** 2).mean() for w in ws), weights, x, name="loss")
        train = harness.Optimizer(RULES[options["optimizer"]]).minimize(loss, global_step=step)
        initialise = rt.global_variables_initializer()
        waiting = rt.report_uninitialized_variables()
    filters = ("/job:ps", f"/job:worker/task:{index}")
    config = rt.SessionConfig(device_filters=filters, start_timeout_secs=60.0)
    with rt.Session(server.target, config=config) as session:
        if index == 0:
            session.run(initialise)
        while len(session.run(waiting)):
            pass
        _obey(lambda: session.run([train, loss], {x: 0.5}), session, step)
    server.stop()


def _listen(commands: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        commands.put(line.strip())


def _obey(train: Callable[[], object], session: rt.Session, step: rt.Variable) -> None:
    commands: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(commands,), daemon=True).start()
    saver, saving, began, steps, training = harness.Saver(), None, 0.0, 0, False
    print("READY", flush=True)
    while True:
        try:
            command, _, directory = commands.get(block=not training).partition(" ")
        except queue.Empty:
            command, directory = "", ""
        if command == "go":
            training, steps = True, 0
        elif command == "save":
            began, saving = time.perf_counter(), saver.save(session, directory, step, wait=False)
        elif command == "stop":
            training = False
            print(json.dumps({"steps": steps}), flush=True)
        elif command == "end":
            return
        if training:
            train()
            steps += 1
        if saving is not None and saving.done():
            saving.result()
            print(json.dumps({"saved_secs": time.perf_counter() - began}), flush=True)
            saving = None


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
