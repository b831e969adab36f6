"""The bytes that a task counts for its sessions are those that it keeps."""

import dataclasses
import random
import threading
from typing import Any

import numpy as np
import pytest

import runtime as rt
from runtime.kernels import resources
from runtime.kernels.queues import QueueResource
from runtime.plan.plan import HeldOutput, StageCall
from runtime.state.cancellation import Cancellation
from runtime.state.ledger import NOBODY, Ledger
from runtime.state.participants import TaskEnvironment
from runtime.state.store import Store
from runtime.task.host_kernels import Context
from runtime.task.registry import RegisteredCall
from tests.kit.waits import until
from tests.runtime.kit import limited
from tests.runtime.task.test_registration import doubled, sent, worker

SESSION = 7


def filled(ledger: Ledger, count: int) -> QueueResource:
    queue = QueueResource("fifo", "q", 10, [np.dtype("float32")], ((4,),), ledger=ledger)
    queue.enqueue_many([(np.zeros(4, np.float32),)] * count, Cancellation(), client=SESSION)
    return queue


def test_cleared_queue_releases_half_batch() -> None:
    """A batch that is half taken when its queue is cleared is released."""
    ledger = Ledger()
    queue = filled(ledger, 2)

    def take() -> None:
        with pytest.raises(rt.CancelledError):
            queue.dequeue_many(3, Cancellation())

    thread = threading.Thread(target=take)
    thread.start()
    until(lambda: queue.size() == 0)
    queue.clear()
    thread.join(60)
    assert not thread.is_alive()
    assert queue.size() == 0 and ledger.of(SESSION) == ledger.total == 0


def test_batch_elements_own_their_bytes() -> None:
    """The elements of a batch own their bytes."""
    described = {
        "name": "q",
        "container": "",
        "kind": "fifo",
        "capacity": 10,
        "dtypes": ["float32"],
        "shapes": [[4]],
    }
    context = Context(
        Store(), "task", {"resource": described}, [np.zeros((3, 4), np.float32)], client=SESSION
    )
    resources._enqueue_many(context)
    element = resources._dequeue_element(context)[0]
    assert element.base is None and element.flags.owndata


def test_refused_reservation_counts_nothing() -> None:
    """A refused reservation counts nothing, and threads stay below the limit."""
    ledger = Ledger(rt.Limits(client_bytes=1000, task_bytes=5000))
    refusals = []

    def reserve() -> None:
        for _ in range(50):
            try:
                ledger.reserve(SESSION, 10, stages=True)
            except rt.ResourceExhaustedError as error:
                refusals.append(error)

    threads = [threading.Thread(target=reserve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ledger.of(SESSION) == ledger.total == 1000 and len(refusals) == 100


def test_late_tensor_is_dropped() -> None:
    """A tensor that is held after the end of its session is dropped."""
    task = worker()
    made = task.registrar.register(
        dataclasses.replace(sent(doubled()), holds={0: HeldOutput(1)}, replies=()), foreign=True
    )
    assert made is not None
    run = made.prepared.run

    def end_meanwhile(*args: Any) -> Any:
        done = run(*args)
        task.gone(SESSION)
        return done

    made.prepared.run = end_meanwhile  # type: ignore[method-assign]
    task.execute(made, SESSION, 1, [np.ones(3, np.float32)])
    assert len(task.rendezvous) == 0 and task.ledger.total == made.nbytes + len(doubled_blob(made))


def doubled_blob(made: RegisteredCall) -> bytes:
    program = made.call.stage.program
    assert program is not None
    return program.blob


def two_calls() -> list[StageCall]:
    call = sent(doubled())
    return [
        call,
        dataclasses.replace(call, stage=dataclasses.replace(call.stage, operations=("other",))),
    ]


@limited(spare_stages=1)
@pytest.mark.parametrize("seed", range(3))
def test_registry_counts_every_hold(seed: int) -> None:
    """After any registration, its end, or the end of a session, the calls and bytes add up."""
    task, calls, draw = worker(), two_calls(), random.Random(seed)
    for _ in range(40):
        session, call = draw.choice((SESSION, SESSION + 1)), draw.choice(calls)
        what = draw.choice(("register", "register", "unregister", "gone"))
        if what == "register":
            assert task.registrar.register(call, session=session, foreign=True) is not None
        elif what == "unregister":
            handles = list(task.registry.kept()[0])
            task.registry.unregister(session, draw.sample(handles, min(1, len(handles))))
        else:
            task.gone(session, goodbye=False)
        task.registry.validate()


@limited(spare_stages=0)
def test_shared_program_counts_once() -> None:
    """A program of two calls counts once."""
    task, calls = worker(), two_calls()
    made = [task.registrar.register(call, session=SESSION, foreign=True) for call in calls]
    assert made[0] is not None and made[1] is not None and made[0] is not made[1]
    program = calls[0].stage.program
    assert program is not None
    ledger = task.ledger
    assert ledger.of(SESSION) == made[0].nbytes + made[1].nbytes + len(program.blob)
    task.registry.unregister(SESSION, [made[0].handle])
    assert ledger.of(SESSION) == made[1].nbytes + len(program.blob)
    task.gone(SESSION)
    task.registry.validate()
    assert ledger.total == 0


def test_program_bytes_are_checked() -> None:
    """A registration whose program exceeds the limit of bytes is refused and counts nothing."""
    task, call = worker(), sent(doubled())
    assert call.stage.program is not None
    made = task.registrar.register(call, session=SESSION, foreign=True)
    assert made is not None
    limits = rt.Limits(client_bytes=made.nbytes + len(call.stage.program.blob) - 1)
    small = type(task)("ps", 0, task._fetch_from, TaskEnvironment(limits=limits))
    with pytest.raises(rt.ResourceExhaustedError, match="client_bytes"):
        small.registrar.register(call, session=SESSION, foreign=True)
    assert len(small.registry) == 0 and small.ledger.total == 0


@limited(spare_stages=0)
def test_revived_stages_are_counted() -> None:
    """Stages that a backup brings are counted before they are released."""
    task, calls = worker(), two_calls()

    def revive(handle: int, call: StageCall) -> RegisteredCall:
        made = task.registrar.register(call, handle=handle, foreign=True)
        assert made is not None
        return made

    task.registry.inherit({1: calls[0], 2: calls[1]}, {SESSION: [1, 2]}, revive)
    for handle in (1, 2):
        task.registry.get(handle)
    ledger = task.ledger
    assert ledger.of(NOBODY) > 0
    task.gone(SESSION)
    assert ledger.total == 0 and len(task.registry) == 0


def test_leftovers_drop_no_spare_stage() -> None:
    """Elements that ended sessions have left drop no spare stage."""
    task = worker()
    made = task.registrar.register(sent(doubled()), session=SESSION, foreign=True)
    task.ledger.reserve(NOBODY, 2 * task.limits.client_bytes, checked=False)
    task.gone(SESSION)
    assert made is not None and task.registry.get(made.handle) is made
