"""The registrar: compiles the stage calls of sessions, and puts the calls into the registry of the task."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from runtime.errors import AbortedError, InvalidArgumentError, NotFoundError
from runtime.observe.trace import Tracer
from runtime.plan.plan import StageCall
from runtime.rpc import rpc
from runtime.state.ledger import NOBODY
from runtime.task.call_waits import CallWaits
from runtime.task.executor import Executor, PreparedStage
from runtime.task.fitting import check_call
from runtime.task.presence import TaskPresence
from runtime.task.program_share import WatchedProgram
from runtime.task.registry import CallRegistration, CallRegistry, RegisteredCall
from runtime.task.traced_stage import FetchFrom, TracedStage, traced_fetch
from runtime.wire.messages import call_to_proto


class StageRegistrar:
    """The registrations of a task. Thread safe.

    Args:
        executor: Executor of the task, which compiles the stages.
        registry: Registry of the task.
        waits: Waits of the calls of the task, which know the sessions that have ended.
        tracer: Tracer for the calls whose runs are timed.
        fetch_from: Fetches a tensor from another task.
        presence: Presence of the task.
    """

    def __init__(
        self,
        executor: Executor,
        registry: CallRegistry,
        waits: CallWaits,
        tracer: Tracer,
        fetch_from: FetchFrom,
        presence: TaskPresence,
    ) -> None:
        self._task = executor.task
        self._executor = executor
        self._registry = registry
        self._waits = waits
        self._tracer = tracer
        self._fetch_from = fetch_from
        self._presence = presence

    def register(
        self,
        call: StageCall,
        generation: int = 0,
        *,
        traced: bool = False,
        writes: Mapping[str, int] | None = None,
        session: int = NOBODY,
        handle: int = 0,
        foreign: bool = False,
    ) -> RegisteredCall | None:
        """Compiles a stage call under a handle, which equal calls of all sessions share.

        Args:
            call: The stage call. The program may come without its bytes.
            generation: Generation of the run record when the session began.
            traced: True for a call whose runs are timed.
            writes: Number of the writing stages of the whole plan, by task; None for a plan with
                only this one.
            session: Session that needs the handle; NOBODY for a caller in this process, which keeps
                the call itself.
            handle: Handle of the call in an earlier process of this task; 0 for a new handle.
            foreign: True for a program of another process, which is an expression list.

        Returns:
            The registered call; None if this task does not know the program and needs its bytes.

        Raises:
            AbortedError: The variables were restored since the session began.
            InvalidArgumentError: The parts of the call do not fit together, the program is refused,
                or a kernel that may wait shares the stage with other kernels.
        """
        self._presence.check()
        # A kernel that waits may be ended and run again; the other kernels of its stage must not
        # run twice.
        if call.stage.may_wait and len(call.stage.host) > 1:
            raise InvalidArgumentError(
                "a kernel that may wait is a stage of its own", task=self._task
            )
        if generation != self._executor.store.run.generation:
            raise AbortedError(
                "its variables were restored since the session began", task=self._task
            )
        # Equal programs are one object, so that many sessions keep the bytes once.
        known = self._with_known_program(call, foreign)
        if known is None:
            return None
        call = known
        described = call_to_proto(call, with_blob=False).SerializeToString(deterministic=True)
        digest, of_plan = hashlib.sha256(described).digest(), tuple(sorted((writes or {}).items()))
        registration = CallRegistration(digest, generation, of_plan, traced, foreign, call.owned)
        # A registration that comes after the goodbye of its session would be held for ever.
        if self._waits.has_ended(session):
            session = NOBODY
        if not handle:
            found = self._registry.find(registration, session)
            if found is not None:
                return found
            self._registry.check_room(session)
            if foreign:
                self._registry.ledger.check(session, len(described), stages=True)
        check_call(call, self._task)
        watched = None
        if foreign and call.stage.program is not None:
            sender = " ".join(rpc.caller().names)
            watched = WatchedProgram(
                call.stage.program.sha256, call.stage.operations, rpc.peer(), sender
            )
            self._executor.watch.start()
        prepared = PreparedStage(self._executor, call.stage, generation, watched, call.owned)
        registered = RegisteredCall(call, prepared, registration, len(described))
        if traced:
            registered.prepared = TracedStage(prepared, call, self._tracer)
            registered.fetch = traced_fetch(self._fetch_from, call, self._tracer)
        added = self._registry.add(registered, session, handle)
        # The session may have ended during the compilation; its other stages were released then.
        if self._waits.has_ended(session):
            self._registry.release(session)
        return added

    def _with_known_program(self, call: StageCall, foreign: bool) -> StageCall | None:
        """Returns a call with the program that is kept here; None if the program is not known and has no bytes.

        Raises:
            NotFoundError: The bytes of another process do not match their SHA-256.
        """
        program = call.stage.program
        if program is None:
            return call
        if foreign and program.blob and hashlib.sha256(program.blob).hexdigest() != program.sha256:
            raise NotFoundError("the program does not match its SHA-256", task=self._task)
        kept = self._registry.program(program)
        return None if kept is None else replace(call, stage=replace(call.stage, program=kept))
