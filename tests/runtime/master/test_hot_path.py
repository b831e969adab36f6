"""What a warm training step must not cost, by counting: compilations, messages, copies, buffers, round trips, bytes."""

import contextlib
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
import numpy as np
import pytest

import runtime as rt
from runtime.task import executor
from runtime.task.worker import RegisteredCall, Worker
from runtime.wire.channel import Lane
from runtime.wire.codec import aligned_buffer
from runtime.wire.connection import Reply
from tests.runtime.kit import TARGET, servers

WIDTH = 256 * 1024
"""Elements of each parameter: 1 MiB."""


CALLS = 145
"""Of Python and C functions, that the client's thread makes in a warm step."""


class Training:
    """A training step of one parameter for each ps, over sockets, warm."""

    def __init__(self, cluster: dict[str, rt.Server], prefetch: int = 0) -> None:
        self.cluster = cluster
        self.count = sum(name.startswith("/job:ps") for name in cluster)
        setter = rt.replica_device_setter(cluster=cluster[TARGET].cluster, worker_device=TARGET)
        with rt.device(setter):
            step = rt.Variable(0, dtype=np.int64, name="step", trainable=False)
            x = rt.placeholder(np.float32, [WIDTH], name="x")
        self.params = []
        for i in range(self.count):
            with rt.device(f"/job:ps/task:{i}"):
                self.params.append(rt.Variable(np.ones(WIDTH, np.float32), name=f"w{i}"))
        with rt.device(setter):
            loss = sum(rt.numpy.mean((w - x) ** 2) for w in self.params)
            gradients = rt.gradients(loss, self.params)
            pushes = [w.assign_sub(0.1 * g) for w, g in zip(self.params, gradients, strict=True)]
            self.fetches = [rt.group(*pushes, step.assign_add(1)), loss, step]
        self.x = x
        self.data = aligned_buffer(WIDTH * 4).view(np.float32)
        self.data[...] = 0.5
        self.session = rt.Session(
            cluster[TARGET].target, config=rt.SessionConfig(prefetch=prefetch)
        )
        self.session.run(rt.global_variables_initializer())
        self.steps(5)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.session.run(self.fetches, {self.x: self.data})


@contextlib.contextmanager
def training(ps: int = 1, prefetch: int = 0) -> Iterator[Training]:
    with servers(sockets=True, ps=ps, worker=1) as cluster, rt.Graph().as_default():
        made = Training(cluster, prefetch)
        with made.session:
            yield made


def test_warm_step_compiles_nothing() -> None:
    """No step after the first traces or compiles."""
    compiled: list[str] = []

    def note(event: str, *_: Any, **__: Any) -> None:
        if "compile" in event or "trace" in event:
            compiled.append(event)

    with training(ps=2) as t:
        before = executor._process_compiler.compilations
        jax.monitoring.register_event_duration_secs_listener(note)
        try:
            t.steps(10)
            assert compiled == []
            assert executor._process_compiler.compilations == before
            jax.jit(lambda v: v * 3 + 1)(np.arange(7))  # what the listener would have seen
            assert compiled
        finally:
            jax.monitoring.unregister_event_duration_listener(note)


def test_warm_step_uses_no_protobuf(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread of a warm step uses a protobuf message."""
    used: list[str] = []
    watching = threading.Event()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if not watching.is_set():
            return
        if event == "c_call":
            module = type(getattr(argument, "__self__", None)).__module__
            if module.startswith("google.") or "_pb2" in module:
                used.append(f"{module}.{argument.__name__}")
        elif event == "call" and "google/protobuf" in frame.f_code.co_filename:
            used.append(frame.f_code.co_filename)

    threading.setprofile(profile)  # threads started from here on
    try:
        with training(ps=2) as t:
            sys.setprofile(profile)
            try:
                watching.set()
                t.steps(10)
                during = list(used)
                # a new plan is registered by gRPC: the profiler sees messages
                t.session.run(t.params[0])
            finally:
                watching.clear()
                sys.setprofile(None)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    assert during == []
    assert used


def _in_place(array: Any) -> bool:
    """Whether XLA reads a numpy array where it is."""
    return jax.device_put(array).unsafe_buffer_pointer() == array.ctypes.data


def test_received_tensors_stay_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both sides read received tensors in the memory where they arrived, step after step."""
    at_ps: list[list[Any]] = []
    at_worker: list[list[Any]] = []
    call, execute = Worker.call, Worker.execute

    def watched_call(self: Worker, handle: int, client: int, step: int, inputs: list[Any]) -> Reply:
        if inputs:
            at_ps.append(inputs)
        return call(self, handle, client, step, inputs)

    def watched_execute(
        self: Worker, registered: RegisteredCall, session: int, step: int, inline: Any, *rest: Any
    ) -> Any:
        if self.task == TARGET:
            at_worker.append(list(inline))
        return execute(self, registered, session, step, inline, *rest)

    with training() as t:
        monkeypatch.setattr(Worker, "call", watched_call)
        monkeypatch.setattr(Worker, "execute", watched_execute)
        t.steps(3)
        assert len(at_ps) == len(at_worker) == 3
        for inputs in (*at_ps, *at_worker):
            large = [value for value in inputs if value.nbytes == WIDTH * 4]
            assert large
            assert all(_in_place(value) for value in large)
        # And the memory is the same in every step: nothing was copied to get there.
        for inputs in (at_ps, at_worker):
            assert (
                len(
                    {
                        tuple(v.ctypes.data for v in values if v.nbytes == WIDTH * 4)
                        for values in inputs
                    }
                )
                == 1
            )


def test_tensors_leave_from_xla_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides send tensors from the memory of XLA."""
    sent: list[Any] = []
    replied: list[Any] = []
    computed: list[Any] = []
    send, call, execute = Lane.send, Worker.call, Worker.execute

    def watched_send(self: Lane, handle: int, step: int, buffers: Any, **options: Any) -> None:
        sent.extend(b for b in buffers if b.nbytes == WIDTH * 4)
        send(self, handle, step, buffers, **options)

    def watched_call(self: Worker, handle: int, client: int, step: int, inputs: list[Any]) -> Reply:
        reply = call(self, handle, client, step, inputs)
        with self.store.lock:
            held = [
                slot.value.unsafe_buffer_pointer()
                for slot in self.store._slots.values()
                if slot.value is not None
            ]
        replied.extend(b.ctypes.data in held for b in reply.buffers if b.nbytes == WIDTH * 4)
        return reply

    def watched_execute(self: Worker, *arguments: Any) -> Any:
        outputs, done = execute(self, *arguments)
        if self.task == TARGET:
            computed.extend(o.unsafe_buffer_pointer() for o in outputs if o.nbytes == WIDTH * 4)
        return outputs, done

    with training() as t:
        monkeypatch.setattr(Lane, "send", watched_send)
        monkeypatch.setattr(Worker, "call", watched_call)
        monkeypatch.setattr(Worker, "execute", watched_execute)
        t.steps(3)
    assert [b.ctypes.data for b in sent] == computed
    assert len(sent) == 3
    assert replied == [True] * 3


@pytest.mark.parametrize("prefetch", [0, 1])
def test_warm_step_allocates_no_parameter(prefetch: int) -> None:
    """A warm step allocates no memory of the size of a parameter."""
    with training(ps=2, prefetch=prefetch) as t:
        tracemalloc.start()  # sees numpy's memory and Python's, not XLA's
        try:
            t.steps(3)
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            t.steps(10)
            _, peak = tracemalloc.get_traced_memory()
            kept = np.empty(WIDTH, np.float32)
            assert tracemalloc.get_traced_memory()[0] >= kept.nbytes  # it would be seen
        finally:
            tracemalloc.stop()
    assert peak - before < WIDTH


@pytest.mark.parametrize("prefetch", [0, 1])
def test_step_makes_two_round_trips(prefetch: int) -> None:
    """A step makes two round trips to each ps and receives each parameter once."""
    with training(ps=3, prefetch=prefetch) as t:
        before = [t.cluster[f"/job:ps/task:{i}"].tensors.counters for i in range(3)]
        t.steps(10)
        # ends what is under way: at most a pull and a push, and this one on one ps
        t.session.run(t.fetches[2])
        after = [t.cluster[f"/job:ps/task:{i}"].tensors.counters for i in range(3)]
    calls = [b.calls - a.calls for a, b in zip(before, after, strict=True)]
    assert all(20 <= count <= 21 + prefetch for count in calls), calls
    sent = [b.bytes_out - a.bytes_out for a, b in zip(before, after, strict=True)]
    assert all(nbytes < 10.2 * WIDTH * 4 + prefetch * WIDTH * 4 for nbytes in sent), sent


def test_all_ps_are_sent_to_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread of a step sends to every ps before it waits for one."""
    events: list[tuple[str, str, int]] = []
    send, receive = Lane.send, Lane.receive

    def watched_send(self: Lane, *arguments: Any, **options: Any) -> None:
        note("send", self)
        send(self, *arguments, **options)

    def watched_receive(self: Lane, *arguments: Any, **options: Any) -> Any:
        note("receive", self)
        return receive(self, *arguments, **options)

    def note(kind: str, lane: Lane) -> None:
        # A heartbeat pings over a lane of its own.
        if not threading.current_thread().name.startswith("heartbeat "):
            events.append((kind, lane.task, threading.get_ident()))

    with training(ps=4) as t:
        monkeypatch.setattr(Lane, "send", watched_send)
        monkeypatch.setattr(Lane, "receive", watched_receive)
        threads = threading.active_count()
        t.steps(1)
        assert threading.active_count() == threads
    assert {thread for _, _, thread in events} == {threading.get_ident()}
    wave = ["send"] * 4 + ["receive"] * 4
    assert [kind for kind, _, _ in events] == wave * 2  # pull, push
    assert {task for _, task, _ in events[:4]} == {f"/job:ps/task:{i}" for i in range(4)}


def test_step_makes_few_calls() -> None:
    """The thread of a step makes no more Python calls than its limit."""
    counted = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    with training() as t:
        sys.setprofile(count)
        try:
            t.steps(10)
        finally:
            sys.setprofile(None)
    assert counted <= 10 * CALLS
