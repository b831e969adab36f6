"""The worker service's heart: what a task does with the calls of any master, over the tensor channel or in process."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from runtime.errors import AbortedError, NotFoundError
from runtime.execution.executor import Executor, PreparedStage
from runtime.execution.gate import Gate
from runtime.execution.shards import Shards
from runtime.execution.store import Store
from runtime.plan.place import Device
from runtime.plan.plan import Program, StageCall
from runtime.server.held import Held
from runtime.server.trace import TracedStage, Tracer, traced_fetch
from runtime.transport.codec import Layout
from runtime.transport.listener import Reply
from runtime.transport.messages import call_to_proto

FETCH = 0
"""The handle by which one task fetches a tensor that another holds for it."""

FetchFrom = Callable[[str, int, int, int], Any]
"""``(task, session, step, slot) -> array``: fetches what another task holds."""


def local_devices(job: str, task: int) -> dict[Device, jax.Device]:
    """The devices of this process under the names that they have as devices of a task."""
    found: dict[Device, jax.Device] = {}
    locals_ = list(jax.local_devices())
    if all(d.platform != "cpu" for d in locals_):
        locals_ += jax.local_devices(backend="cpu")
    for kind in dict.fromkeys(d.platform for d in locals_):
        for index, device in enumerate(d for d in locals_ if d.platform == kind):
            name = "GPU" if kind in ("gpu", "cuda", "rocm") else kind.upper()
            platform = device.client.platform_version and _export_platform(device)
            found[Device(job, task, name, index, platform)] = device
    return found


def _export_platform(device: jax.Device) -> str:
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in str(device.client.platform_version).lower() else "cuda"


class RegisteredCall:
    """A stage call as a task keeps it: prepared, with its layouts."""

    def __init__(self, call: StageCall, prepared: PreparedStage, writes: Mapping[str, int]) -> None:
        self.call = call
        self.writes = dict(writes)
        """By task, the writing stages of the whole step; empty when it has only this one."""
        self.gated = bool(call.stage.writes)
        self.prepared: PreparedStage | TracedStage = prepared
        self.fetch: FetchFrom | None = None
        """How its remote inputs are fetched when that is to be timed."""
        stage = call.stage
        self.inline = [i for i in range(len(call.inputs)) if i not in call.remote]
        self.dynamic = stage.inputs is None or stage.output_specs is None
        self.input_layout = None if stage.inputs is None else Layout([stage.inputs[i] for i in self.inline])
        self.remember = stage.writes_state


class Worker:
    """State and stages of one task; the handler behind its tensor channel.

    Args:
        job: name of the job.
        index: index of the task.
        fetch_from: fetches a tensor from another task (in-process or over the tensor channel).
    """

    def __init__(self, job: str, index: int, fetch_from: FetchFrom) -> None:
        self.task = f"/job:{job}/task:{index}"
        self.devices = local_devices(job, index)
        self.store = Store()
        self.held = Held()
        by_name = {(d.type, d.index): device for d, device in self.devices.items()}
        self.executor = Executor(self.store, self.task, by_name)
        self.gate = Gate(self.task)
        self.shards = Shards(self.store, self.task, self.gate, by_name)
        self._fetch_from = fetch_from
        self._lock = threading.Lock()
        self._handles = itertools.count(FETCH + 1)
        self._calls: dict[int, RegisteredCall] = {}
        self._by_digest: dict[bytes, int] = {}
        self._programs: dict[bytes, Program] = {}
        self._sessions: dict[int, threading.Event] = {}
        self.tracer = Tracer()

    # -- registration ------------------------------------------------------------------------------------------

    def register(
        self,
        call: StageCall,
        sha256: bytes = b"",
        generation: int = 0,
        traced: str = "",
        writes: Mapping[str, int] | None = None,
    ) -> int | None:
        """Compiles a stage call and gives it a handle; equal calls of any session share one.

        Args:
            call: the stage call; its program may come without its blob when ``sha256`` is given.
            sha256: what the program is known by.
            generation: of the run record when the session began.
            traced: "here" or "over the wire" gives a handle whose runs are timed, for a caller who is there.
            writes: by task, the writing stages of the whole plan, when it has several.

        Returns:
            The handle, or None when the program is not known here and its blob must be sent.

        Raises:
            AbortedError: the variables were restored since then.
        """
        if generation != self.store.run.generation:
            raise AbortedError("its variables were restored since the session began", task=self.task)
        program = call.stage.program
        if program is not None:
            sha256 = sha256 or bytes.fromhex(program.sha256)
            with self._lock:
                if program.blob:
                    if hashlib.sha256(program.blob).digest() != sha256:
                        raise NotFoundError("the program does not match its SHA-256", task=self.task)
                    program = self._programs.setdefault(sha256, program)
                elif sha256 in self._programs:
                    program = self._programs[sha256]
                else:
                    return None
            call = replace(call, stage=replace(call.stage, program=program))
        described = call_to_proto(call, with_blob=False).SerializeToString(deterministic=True)
        identity = (sha256, described, generation, traced, sorted((writes or {}).items()))
        digest = hashlib.sha256(repr(identity).encode()).digest()
        with self._lock:
            if digest in self._by_digest:
                return self._by_digest[digest]
        registered = RegisteredCall(call, self.executor.prepare(call.stage, generation), writes or {})
        if traced:
            registered.prepared = TracedStage(registered.prepared, call, self.tracer, traced == "over the wire")
            registered.fetch = traced_fetch(self._fetch_from, call, self.tracer)
        with self._lock:
            handle = self._by_digest.setdefault(digest, next(self._handles))
            self._calls.setdefault(handle, registered)
        return handle

    def registered(self, handle: int) -> RegisteredCall:
        """The call behind a handle. Raises NotFoundError when there is none (the task has restarted)."""
        try:
            return self._calls[handle]
        except KeyError:
            raise NotFoundError(f"no stage is registered under handle {handle}", task=self.task) from None

    # -- running -----------------------------------------------------------------------------------------------

    def execute(self, registered: RegisteredCall, session: int, step: int, inline: Sequence[Any]) -> tuple[list[Any], Any]:
        """Runs a registered stage: fetches what other tasks hold for it, holds what others will fetch.

        Returns:
            All outputs, and what ``PreparedStage.wait`` takes.
        """
        call = registered.call
        inputs: Sequence[Any] = inline
        if call.remote:
            filled: list[Any] = [None] * len(call.inputs)
            for i, value in zip(registered.inline, inline, strict=True):
                filled[i] = value
            fetch = registered.fetch or self._fetch_from
            for i, source in call.remote.items():
                filled[i] = fetch(source.task, session, step, source.slot)
            inputs = filled
        cancelled = self._cancelled(session) if call.stage.host else None
        if registered.gated:
            outputs, done = self._run_gated(registered, inputs, session, step, cancelled)
        else:
            outputs, done = registered.prepared.run(inputs, session, cancelled)
        for i, fetches in call.holds.items():
            self.held.put((session, step, call.outputs[i]), outputs[i], fetches)
        return outputs, done

    def _run_gated(
        self, registered: RegisteredCall, inputs: Sequence[Any], session: int, step: int, cancelled: threading.Event | None
    ) -> tuple[list[Any], Any]:
        """Runs a stage that writes variables, which a checkpoint may hold back for an instant."""
        key = (session, step)
        self.gate.enter(key)
        writes = None
        try:
            result = registered.prepared.run(inputs, session, cancelled)
            writes = registered.writes
            return result
        finally:
            self.gate.leave(key, writes)

    def _cancelled(self, session: int) -> threading.Event:
        with self._lock:
            return self._sessions.setdefault(session, threading.Event())

    def end_session(self, session: int) -> None:
        """Cancels what still runs for a session and forgets what is held for it."""
        self._cancelled(session).set()
        with self.store.lock:
            self.store.changed.notify_all()
        self.held.drop_session(session)
        self.tracer.take(session)
        with self._lock:
            self._sessions.pop(session, None)

    # -- the tensor channel's handler ----------------------------------------------------------------------------

    def input_layout(self, handle: int) -> Layout | None:
        """The layout of a call's payload; None when it describes itself."""
        return None if handle == FETCH else self.registered(handle).input_layout

    def call(self, handle: int, client: int, step: int, inputs: list[Any]) -> Reply:
        """Answers one call of the tensor channel."""
        if handle == FETCH:
            session, of_step, slot = (int(n) for n in inputs[0])
            return Reply([np.asarray(self.held.take((session, of_step, slot)))], remember=True, dynamic=True)
        registered = self.registered(handle)
        outputs, done = self.execute(registered, client, step, inputs)
        buffers = [np.asarray(outputs[i]) for i in registered.call.replies]
        registered.prepared.wait(done)  # the inputs lie in the connection's buffer, which the next call overwrites
        return Reply(buffers, remember=registered.remember, dynamic=registered.dynamic)

    def disconnected(self, client: int, lane: int) -> None:
        """A client went away while a call of it was running: what waits for it is cancelled."""
        self.end_session(client)
