"""The program of the recovery tests' tasks: a tiny model that counts, and a parent that says what to do next.

Every worker's step adds 1 to the global step and to two vectors; the three live on different ps
tasks as soon as there are two. So in any consistent state all elements of both vectors equal the
global step. With ``table`` the vectors are rows of a table. With ``devices`` the workers train the
model of ``mesh_model``.
"""

import threading
import time
from logging import Handler
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

import harness
import runtime as rt
from runtime.tables.paging import SMALLEST
from tests.harness.training.start import mesh_model
from tests.harness.training.start.mesh_model import Model

SIZE = 4


class _Lines(Handler):
    """Sends what is logged to the parent."""

    def __init__(self, pipe: Connection, lock: threading.Lock) -> None:
        super().__init__()
        self._pipe = pipe
        self._lock = lock

    def emit(self, record: Any) -> None:
        with self._lock:
            self._pipe.send(("LOG", record.getMessage(), record.levelname))


def run(
    job: str, index: int, cluster: dict[str, list[str]], options: dict[str, Any], pipe: Connection
) -> None:
    """One task, in a process of its own."""
    started = time.monotonic()
    lock = threading.Lock()
    logging.set_verbosity(logging.INFO)
    handler = _Lines(pipe, lock)
    logging.get_absl_logger().handlers[:] = [handler]
    logging.get_absl_logger().addHandler(handler)
    logging.get_absl_logger().propagate = False

    def say(*what: Any) -> None:
        with lock:
            pipe.send(what)

    if devices := options.get("devices"):
        jax.config.update("jax_num_cpu_devices", devices)
    backups = options.get("backup", {}) if job == "ps" else {}
    server = rt.Server(cluster, job, index, **backups)
    if job == "ps":
        say("SERVING")
        server.join()
        say("LEFT")
        return
    with server:
        try:
            _work(server, index, cluster, options, say, pipe, started)
        except rt.OpError as error:
            say("ERROR", str(error))
            raise
    say("ENDED")


def _work(
    server: rt.Server,
    index: int,
    cluster: Any,
    options: dict[str, Any],
    say: Any,
    pipe: Any,
    started: float,
) -> None:
    me = harness.Member(rt.ClusterSpec(cluster), "worker", index, server)
    if "devices" in options:
        model = mesh_model.build(me, options["devices"], options["synchronous"])
    else:
        together = options.get("together", 0)
        model = _counting_rows(me, together) if options.get("table") else _counting(me)
    global_step = model.step
    fetches, state = [model.count, model.learn], [global_step, *model.params]
    if options.get("monitored"):
        _monitored(server, index, options, say, pipe, fetches, state, started)
        return
    logdir = options.get("logdir")
    saver: Any = harness.Supervisor.USE_DEFAULT if logdir else None
    if options.get("announce_saves"):
        saver = _AnnouncingSaver(say, pipe)
    manager = None
    if options.get("own_manager"):
        manager = harness.SessionManager(ready_op=rt.report_uninitialized_variables())
    supervisor = harness.Supervisor(
        is_chief=options.get("chief", index == 0),
        logdir=logdir,
        saver=saver,
        session_manager=manager,
        save_model_secs=options.get("save_secs", 0),
        save_summaries_secs=options.get("summary_secs", 0),
        stop_grace_secs=options.get("grace_secs", 10),
        init_fn=(lambda _: _init(say, pipe)) if options.get("init_fn") and index == 0 else None,
    )
    extra = {
        "max_wait_secs": options.get("max_wait_secs", 60),
        "recover": options.get("recover", True),
    }
    with supervisor.managed_session(server.target, **extra) as session:
        say("READY", int(session.run(global_step)), round(time.monotonic() - started, 3))
        _obey(
            supervisor.should_stop,
            lambda: int(session.run(fetches, model.feed)[0]),
            lambda: session.run(state),
            lambda: supervisor.saver.save(
                session.raw, supervisor.save_path, global_step=global_step
            ),
            say,
            pipe,
        )


def _counting(me: harness.Member) -> Model:
    with me.device():
        global_step = harness.get_or_create_global_step()
        first = rt.Variable(np.zeros(SIZE, np.float32), name="first")
        second = rt.Variable(np.zeros(SIZE, np.float32), name="second")
        one = np.ones(SIZE, np.float32)
        step = rt.group(first.assign_add(one), second.assign_add(one))
        return Model(step, global_step.assign_add(1), global_step, [first, second], {})


def _counting_rows(me: harness.Member, together: int) -> Model:
    """A step adds 1 to some rows of a table, by the gradients of two lookups, and to a variable.

    With ``together`` a step is one of so many workers.
    """
    with me.device():
        global_step = harness.get_or_create_global_step()
        zeros = jax.nn.initializers.zeros
        table = rt.Table("counts", rows=3 * SMALLEST, dim=2, initializer=zeros)
        rows = [table.lookup(page * SMALLEST + np.arange(SIZE)) for page in range(2)]
        dense = rt.Variable(np.zeros(SIZE, np.float32), name="dense")
        loss = rt.call(lambda *found: -sum(each.sum() for each in found), *rows, dense)
        optimizer: Any = harness.Optimizer(optax.sgd(1.0), tables=optax.sgd(1.0))
        if together:
            optimizer = harness.SyncReplicas(optimizer, together)
        train = optimizer.minimize(loss, global_step)
        flat = [rt.call(jnp.ravel, rows[0])]
        flat.append(
            rt.call(lambda *parts: jnp.concatenate([*map(jnp.ravel, parts)]), rows[1], dense)
        )
        with rt.control_dependencies([train]):
            after = rt.identity(global_step)
        return Model(train, after, global_step, flat, {})


class _AnnouncingSaver(harness.Saver):
    """Says that it is about to save, and waits until the parent has done what it wants to do just then."""

    def __init__(self, say: Any, pipe: Any) -> None:
        super().__init__()
        self._say = say
        self._pipe = pipe

    def save(self, *args: Any, **kwargs: Any) -> str:
        self._say("SAVING")
        assert self._pipe.recv() == ("go",)
        return super().save(*args, **kwargs)


def _init(say: Any, pipe: Any) -> None:
    say("INIT_FN")
    assert pipe.recv() == ("go",)


def _monitored(
    server: Any,
    index: int,
    options: Any,
    say: Any,
    pipe: Any,
    fetches: Any,
    state: Any,
    started: float,
) -> None:
    with harness.MonitoredTrainingSession(
        server.target,
        index == 0,
        checkpoint_dir=options.get("logdir"),
        save_checkpoint_steps=options.get("save_steps", 10),
        save_summaries_steps=None,
        log_step_count_steps=None,
        stop_grace_period_secs=options.get("grace_secs", 10),
        max_wait_secs=options.get("max_wait_secs", 60),
    ) as session:
        say("READY", 0, round(time.monotonic() - started, 3))
        _obey(
            session.should_stop,
            lambda: int(session.run(fetches)[0]),
            lambda: session.run(state),
            lambda: "",
            say,
            pipe,
        )


def _obey(should_stop: Any, step: Any, values: Any, save: Any, say: Any, pipe: Any) -> None:
    """Does what the parent says until it says that this is the end."""
    while not should_stop():
        order = pipe.recv()
        if order[0] == "end":
            return
        if order[0] == "raise":
            raise ValueError("the parent says so")
        if order[0] == "steps":
            for _ in range(order[1]):
                last = step()
            say("STEPS", last)
        elif order[0] == "train":  # until told otherwise
            done = 0
            while not pipe.poll():
                last = step()
                done += 1
                say("STEP", last)
                if should_stop():
                    break
            say("TRAINED", done)
        elif order[0] == "values":
            say("VALUES", [np.asarray(v).tolist() for v in values()])
        elif order[0] == "save":
            say("SAVED", save())
