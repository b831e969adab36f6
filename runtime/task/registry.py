"""The registry: the stage calls of a task, which sessions with equal graphs share.

A worker adds calls when sessions register their plans, and finds the calls by handle in every step.
A call without a session is kept for the next session with an equal graph, while there is room.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from runtime import concurrency
from runtime.errors import AbortedError, NotFoundError, PermissionDeniedError
from runtime.limits import Limits
from runtime.plan.plan import Program, ProgramIdentity, StageCall, VariableOutput
from runtime.state.interrupts import uninterrupted
from runtime.state.ledger import NOBODY, Ledger
from runtime.task.executor import PreparedStage
from runtime.task.traced_stage import FetchFrom, TracedStage
from runtime.wire.codec import TensorLayout
from runtime.wire.handles import ORDERS

Inherited = Any
"""The description of a call by an earlier process of the task.

Only the function ``revive`` reads a description.
"""


class CallRegistration(NamedTuple):
    """The arguments of a registration. Equal registrations share a registered call.

    Attributes:
        call: SHA-256 of the stage call as a message, without the program's bytes.
        generation: Generation of the run record when the session began.
        writes: Tasks with the numbers of their writing stages in the whole step, sorted; empty for
            a single stage.
        traced: True for a call whose runs are timed.
        foreign: True for a program that another process has made.
        owned: Inputs that an accelerator receives as copies.
    """

    call: bytes
    generation: int = 0
    writes: tuple[tuple[str, int], ...] = ()
    traced: bool = False
    foreign: bool = False
    owned: tuple[int, ...] = ()


class RegisteredCall:
    """A prepared stage call, with its layouts."""

    def __init__(
        self,
        call: StageCall,
        prepared: PreparedStage,
        registration: CallRegistration,
        nbytes: int = 0,
    ) -> None:
        self.call = call
        self.nbytes = nbytes
        """Bytes of the call as a message, without the program."""
        self.owner = NOBODY
        """The session that registered the call first.

        The ledger counts the bytes for this session.
        """
        self.handle = 0
        self.registration = registration
        self.writes = dict(registration.writes)
        """Numbers of the writing stages of the whole step, by task; empty for a single stage."""
        self.gated = call.stage.updates
        self.prepared: PreparedStage | TracedStage = prepared
        self.fetch: FetchFrom | None = None
        """The timed fetch of remote inputs; None for a call that is not timed."""
        stage = call.stage
        self.inline = [i for i in range(len(call.inputs)) if i not in call.remote]
        self.dynamic = stage.inputs is None or stage.output_specs is None
        self.input_layout = (
            None if stage.inputs is None else TensorLayout([stage.inputs[i] for i in self.inline])
        )
        self.remember = stage.writes_state or bool(call.remote)
        """True if the reply is kept, so that the call never runs twice.

        The call writes, or fetches held tensors.
        """
        self.reads = any(
            isinstance(o, VariableOutput) and o.index not in stage.writes for o in stage.outputs
        )
        """True if the call returns values of variables.

        Gradients of these values have their age.
        """
        self.pushes = (bool(stage.writes) or stage.updates) and bool(call.inputs)
        """True if the call changes variables by its inputs. A count of steps is no push."""


@dataclass
class _HandleRow:
    """A handle with its call, or with the call's description by an earlier process, and the number of its sessions."""

    call: RegisteredCall | None = None
    inherited: Inherited = None
    holders: int = 0


@dataclass
class _KeptProgram:
    """A program of the calls, the session that the bytes count for, and the number of calls with the program."""

    program: Program
    owner: int
    calls: int = 0


class CallRegistry:
    """Stage calls by handle and by identity. Thread safe.

    A call is kept while a session lives that has registered the call and has a plan with the call.
    Of the calls without a session the newest are kept.

    Args:
        task: Name of the task, for errors.
        limits: Limits on the calls of a session, the calls without a session, and the sessions with
            calls.
        ledger: The ledger that counts the bytes of stages and programs.
        connected: Returns True if a session has a connection now.
    """

    def __init__(
        self, task: str, limits: Limits, ledger: Ledger, connected: Callable[[int], bool]
    ) -> None:
        self._task = task
        self._limits = limits
        self.ledger = ledger
        self._connected = connected
        self._lock = concurrency.RLock()
        self._last_handle = 0
        # By handle.
        self._rows: dict[int, _HandleRow] = {}
        self._by_registration: dict[CallRegistration, RegisteredCall] = {}
        self._programs: dict[ProgramIdentity, _KeptProgram] = {}
        # By session, the handles with the numbers of their registrations.
        self._held: OrderedDict[int, Counter[int]] = OrderedDict()
        # The handles without a session, the oldest first.
        self._spare: OrderedDict[int, None] = OrderedDict()
        # The handles of sessions that were silent for too long, and may come back.
        self._released: OrderedDict[int, frozenset[int]] = OrderedDict()
        self._revive: Callable[[int, Inherited], RegisteredCall] | None = None
        self.changes = 0
        """The number of changes: calls that come or go, and sessions that take or drop a call."""

    def __len__(self) -> int:
        """Returns the number of stage calls that are kept."""
        return sum(row.call is not None for row in self._rows.copy().values())

    @property
    def sessions(self) -> int:
        """The number of sessions with calls."""
        # With the lock, a session that is just ending has dropped all calls or none.
        with self._lock:
            return len(self._held)

    def get(self, handle: int) -> RegisteredCall:
        """Returns the call of a handle.

        Raises:
            AbortedError: The call was dropped, because its session was silent for too long.
            NotFoundError: No call ever had the handle.
        """
        # Without the lock, as each call of the tensor channel comes here: one look-up in a dict is
        # atomic.
        row = self._rows.get(handle)
        if row is not None:
            if row.call is not None:
                return row.call
            if self._revive is not None:
                return self._revive(handle, row.inherited)
        if 0 < handle <= self._last_handle:
            raise AbortedError(
                "the session was silent for so long that its stages were dropped; open a new one",
                task=self._task,
            )
        raise NotFoundError(f"no stage is registered under handle {handle}", task=self._task)

    def check_holder(self, handle: int, session: int) -> None:
        """Checks that a session has the call of a handle, or had it before the session was silent for too long.

        Raises:
            PermissionDeniedError: The call is another session's.
        """
        with self._lock:
            if handle not in self._held.get(session, ()) and handle not in self._released.get(
                session, ()
            ):
                raise PermissionDeniedError(
                    f"stage {handle} is not one of this session's", task=self._task
                )

    def kept(self) -> tuple[dict[int, RegisteredCall], dict[int, Inherited], dict[int, list[int]]]:
        """Returns calls by handle, inherited calls that were not used yet, and handles by session.

        A handle is listed as often as the session has registered it.
        """
        with self._lock:
            held = {session: sorted(handles.elements()) for session, handles in self._held.items()}
            calls = {handle: row.call for handle, row in self._rows.items() if row.call is not None}
            return (
                calls,
                {h: row.inherited for h, row in self._rows.items() if row.call is None},
                held,
            )

    def inherit(
        self,
        calls: Mapping[int, Inherited],
        sessions: Mapping[int, Sequence[int]],
        revive: Callable[[int, Inherited], RegisteredCall],
    ) -> None:
        """Continues with the calls of an earlier process of the task; each call is made at its first use.

        Args:
            calls: by handle, anything.
            sessions: by session, the handles that it holds, each as often as it was registered.
            revive: makes a call, adds the call under its handle and returns it.
        """
        with self._lock:
            assert not self._rows, "a worker inherits calls before its first registration"
            self._last_handle = max(calls, default=0)
            self._rows = {handle: _HandleRow(inherited=call) for handle, call in calls.items()}
            self._revive = revive
            for session, handles in sessions.items():
                for handle in handles:
                    self._hold(handle, session)
            self._spare.update(
                (handle, None) for handle, row in self._rows.items() if not row.holders
            )

    def program(self, program: Program) -> Program | None:
        """Returns the kept program of the same identity, else the program; None without bytes of an unknown program."""
        with self._lock:
            kept = self._programs.get(program.identity)
        if kept is not None:
            return kept.program
        return program if program.blob else None

    def find(self, registration: CallRegistration, session: int) -> RegisteredCall | None:
        """Returns the call of a registration, and keeps the call for a session; None for a new registration.

        Raises:
            ResourceExhaustedError: The session has too many calls, as in ``add``.
        """
        with self._lock:
            call = self._by_registration.get(registration)
            if call is not None:
                self.check_room(session, call.handle)
                self._hold(call.handle, session)
            return call

    @uninterrupted
    def add(self, call: RegisteredCall, session: int, handle: int = 0) -> RegisteredCall:
        """Keeps a call for a session under a handle of its own.

        Args:
            call: The call.
            session: Session that holds the call.
            handle: Handle of the call in an earlier process of the task; 0 for a new handle.

        Returns:
            The call; that of an equal registration if there is such a call.

        Raises:
            ResourceExhaustedError: The session has too many calls or too many bytes of calls, or
                too many sessions with calls are connected.
        """
        with self._lock:
            known = self._by_registration.get(call.registration)
            if not handle:
                self.check_room(session, 0 if known is None else known.handle)
            if known is None:
                self._reserve(
                    call,
                    NOBODY if handle else session,
                    checked=call.registration.foreign and not handle,
                )
                # Handles are never used again: a late call must not meet another stage.
                if not handle:
                    self._last_handle += 1
                    assert self._last_handle not in self._rows, "a handle is used again"
                call.handle = handle or self._last_handle
                assert call.handle not in ORDERS, "calls of the stage would go elsewhere"
                assert call.handle <= self._last_handle, "a later call would have the same handle"
                known = self._by_registration[call.registration] = call
                self._rows.setdefault(call.handle, _HandleRow()).call = call
            # A handle of an earlier process is held, or spare, already.
            if handle:
                self._rows.setdefault(handle, _HandleRow()).call = known
                return known
            self._hold(known.handle, session)
            return known

    def _reserve(self, call: RegisteredCall, owner: int, checked: bool) -> None:
        """Counts the bytes of a call, and those of a program that no other call has."""
        count, program = call.nbytes, call.call.stage.program
        kept = (
            None
            if program is None
            else self._programs.get(program.identity, _KeptProgram(program, owner))
        )
        if kept is not None and not kept.calls:
            count += len(kept.program.blob)
        self.ledger.reserve(owner, count, checked=checked, stages=True)
        if kept is not None:
            self._programs[kept.program.identity] = kept
            kept.calls += 1
        # The bytes are released for the session that they were counted for, whoever holds the call.
        call.owner = owner

    @uninterrupted
    def unregister(self, session: int, handles: Sequence[int]) -> None:
        """Undoes one registration of each handle; the calls that no session needs become spare."""
        with self._lock:
            held = self._held.get(session)
            if held is None:
                return
            self.changes += 1
            for handle in handles:
                if held[handle] > 1:
                    held[handle] -= 1
                elif held.pop(handle, 0):
                    self._let_go(handle)
            self._trim()

    @uninterrupted
    def release(self, session: int) -> None:
        """Ends a session's hold on all calls. A call without a session becomes spare."""
        with self._lock:
            self.changes += 1
            held = self._held.pop(session, None)
            # A client that comes back finds its stages, as long as they are spare.
            if held:
                self._released[session] = frozenset(held)
                while len(self._released) > self._limits.stage_sessions:
                    self._released.popitem(last=False)
                for handle in held:
                    self._let_go(handle)
            self.ledger.end(session)
            self._trim()

    def check_room(self, session: int, handle: int = 0) -> None:
        """Checks that a session may have another call, before the call is compiled.

        A new session finds room in place of the oldest that is not connected.

        Args:
            session: The session.
            handle: Handle of the call; 0 for a new call.

        Raises:
            ResourceExhaustedError: The session has too many calls, as in ``add``.
        """
        if session == NOBODY:
            return
        limits = self._limits
        with self._lock:
            held = self._held.get(session)
            if held is None:
                if len(self._held) < limits.stage_sessions:
                    return
                silent = next((other for other in self._held if not self._connected(other)), None)
                if silent is None:
                    what = f"{len(self._held)} sessions that are connected have stages"
                    raise limits.exceeded("stage_sessions", what, self._task)
                self.release(silent)
            elif handle not in held and len(held) >= limits.session_stages:
                raise limits.exceeded(
                    "session_stages", f"{len(held)} stages are kept for this session", self._task
                )

    def _hold(self, handle: int, session: int) -> None:
        # The backup sends the table of sessions again only after a change.
        self.changes += 1
        if session == NOBODY:
            if not self._rows[handle].holders:
                self._spare[handle] = None
                self._spare.move_to_end(handle)
                self._trim()
            return
        held = self._held.setdefault(session, Counter())
        self._held.move_to_end(session)
        held[handle] += 1
        if held[handle] == 1:
            self._rows[handle].holders += 1
            self._spare.pop(handle, None)

    def _let_go(self, handle: int) -> None:
        row = self._rows[handle]
        row.holders -= 1
        assert row.holders >= 0
        if not row.holders:
            self._spare[handle] = None

    def _trim(self) -> None:
        limits = self._limits
        while len(self._spare) > limits.spare_stages or self._spare_bytes() > limits.client_bytes:
            handle, _ = self._spare.popitem(last=False)
            assert not self._rows[handle].holders, "a spare call has a session"
            call = self._rows.pop(handle).call
            if call is not None and call.handle == handle:
                self._drop(call)

    def _drop(self, call: RegisteredCall) -> None:
        """Forgets a call, and a program that no other call has."""
        del self._by_registration[call.registration]
        self.ledger.release(call.owner, call.nbytes)
        if (program := call.call.stage.program) is not None:
            kept = self._programs[program.identity]
            kept.calls -= 1
            assert kept.calls >= 0
            if not kept.calls:
                del self._programs[program.identity]
                self.ledger.release(kept.owner, len(kept.program.blob))

    def validate(self) -> None:
        """Asserts the invariants; for tests."""
        with self._lock:
            held = Counter(handle for handles in self._held.values() for handle in handles)
            assert held.keys() | self._spare.keys() <= self._rows.keys(), "a handle has no row"
            for handle, row in self._rows.items():
                assert 0 < handle <= self._last_handle
                assert row.holders == held[handle], "a session is counted twice, or not at all"
                assert (handle in self._spare) == (not row.holders)
            # A call of an earlier process may have the handle of an equal call, too.
            calls = {id(row.call): row.call for row in self._rows.values() if row.call is not None}
            assert {id(call) for call in self._by_registration.values()} == calls.keys()
            programs = [
                p.identity for c in calls.values() if (p := c.call.stage.program) is not None
            ]
            assert {key: kept.calls for key, kept in self._programs.items()} == Counter(programs)
        self.ledger.validate()

    def _spare_bytes(self) -> int:
        spare = [call for handle in self._spare if (call := self._rows[handle].call) is not None]
        blobs = {
            p.identity: len(p.blob) for call in spare if (p := call.call.stage.program) is not None
        }
        return sum(call.nbytes for call in spare) + sum(blobs.values())
