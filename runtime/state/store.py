"""The store: the variables and the named resources of a task, in named containers."""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, TracebackType

import jax
import numpy as np

from runtime import concurrency
from runtime.errors import (
    AbortedError,
    InvalidArgumentError,
    OpError,
    UninitializedError,
    one_line,
)
from runtime.observe.trace import nbytes
from runtime.state.cancellation import Cancellation
from runtime.state.interrupts import uninterrupted
from runtime.state.leadership import RunState
from runtime.state.ledger import NOBODY, Ledger
from runtime.state.participants import TaskEnvironment
from runtime.state.run_record import RunRecord
from runtime.tensor_spec import AnyArray, Array, TensorSpec

Key = tuple[str, str]
"""(container, name)."""
Values = dict[Key, "weakref.ref[AnyArray]"]
"""Weak references to the values of variables, for comparison: every update makes a new array."""


class VariableSlot:
    """The place of a variable. Stages hold slots, so that a step looks up no names.

    Attributes:
        key: (container, name).
        lock: held while a stage computes with the value; see ``VariableClaim``.
        value: a ``jax.Array`` (an object array for strings); None until the variable is
            initialised.
        spec: shape and dtype of the value.
        lost: the reason of the loss if a failed program has taken the value along; else empty.
        readers: number of references to the value that are not pinned yet. Above 0, an update must
            not donate the array.
        counted: bytes of the value in the ledger.
    """

    __slots__ = ("key", "lock", "value", "spec", "lost", "readers", "counted")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.lock = concurrency.Lock()
        self.value: AnyArray | None = None
        self.spec: TensorSpec | None = None
        self.lost = ""
        self.readers = 0
        self.counted = 0

    def checked(self, spec: TensorSpec, task: str) -> AnyArray:
        """Returns the value for a program that expects ``spec``.

        Raises:
            FailedPreconditionError: The variable is not initialised.
            AbortedError: The value of the variable was lost.
            InvalidArgumentError: The variable was initialised with another shape or dtype.
        """
        value = self.value
        if value is None:
            raise self.missing(task)
        # Programs mostly share the object, and the comparison of two specs is slower.
        if self.spec is not spec and self.spec != spec:
            assert self.spec is not None
            raise InvalidArgumentError(
                f"variable {self.key[1]!r} was initialised as "
                f"{self.spec.dtype}{list(self.spec.shape)}, "
                f"but this graph has it as {spec.dtype}{list(spec.shape)}",
                task=task,
            )
        return value

    def take_over(self) -> Array:
        """Returns the memory of the value for a change in place, or a copy if somebody else holds the value.

        The slot must be claimed. The caller stores a view of the memory as the new value: whoever
        compares values by identity, such as a backup, sees the change. A save, a backup and a
        reader hold references to the value, or views of its memory, and count as XLA counts before
        it takes over memory; weak references do not.
        """
        assert self.lock.locked() and self.value is not None, "only a claimed value changes"
        if not self.readers and _has_own_memory(self.value) and _count_holders(self) == _ALONE:
            memory: Array = self.value.base  # type: ignore[union-attr, assignment]
            return memory
        return np.array(self.value)

    def missing(self, task: str = "") -> OpError:
        """Returns the error of a variable without a value.

        A lost value is an AbortedError, which makes a session recover.
        """
        if self.lost:
            return AbortedError(
                f"Attempting to use uninitialized value {self.key[1]}: {self.lost}", task=task
            )
        return _uninitialized_error([self], task)


def _has_own_memory(value: AnyArray) -> bool:
    """Returns True if a value is a view of NumPy's memory, which ``take_over`` has returned before."""
    return isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray)


def _count_holders(slot: VariableSlot) -> tuple[int, int]:
    """Counts the references to a value, and to its memory."""
    value = slot.value
    assert isinstance(value, np.ndarray), "XLA counts the references to its own arrays"
    return sys.getrefcount(value), sys.getrefcount(value.base)


def _count_alone() -> tuple[int, int]:
    """Returns the counts of a value that only its slot holds."""
    slot = VariableSlot(("", ""))
    slot.value = np.zeros(1).view()
    return _count_holders(slot)


_ALONE = _count_alone()


def _uninitialized_error(slots: Iterable[VariableSlot], task: str) -> UninitializedError:
    names = ", ".join(slot.key[1] for slot in slots)
    cure = "run rt.global_variables_initializer() first, or train in a session of a Supervisor, which does"
    return UninitializedError(f"Attempting to use uninitialized value {names}: {cure}", task=task)


class Resource:
    """A named thing in a container beside the variables: a queue, an accumulator, a quorum.

    The methods report events. A kind of resource overrides the methods for events that end waits.

    Attributes:
        described: the description that the resource was made from. Every session must describe the
            resource alike.
    """

    described: Mapping[str, object] = MappingProxyType({})

    @property
    def dropped_gradients(self) -> int:
        """Gradients that were dropped as stale or repeated."""
        return 0

    def clear(self) -> None:
        """Ends all waits: the container was cleared."""

    def end_client(self, client: int) -> None:
        """Notes the end of a session, which contributes no more."""

    def retire(self, client: int, index: int) -> None:
        """Notes that an open session trains no more; ``index`` is the index of the session's task."""

    def set_finished(self, finished: bool) -> None:
        """Notes that training has finished, or has begun again."""


class VariableClaim:
    """The right of a running stage to variables.

    In the ``with`` block no other stage reads or changes the variables.

    Stages with different variables do not wait. All claims take the locks in the order of the keys,
    so that no two claims block each other. The store's lock may be taken within a claim, and no
    claim under the store's lock. A function that claims is ``uninterrupted``: an exception between
    the last lock and the block would leave the slots locked.

    Args:
        slots: slots of the variables. A slot may come twice.
    """

    __slots__ = ("_locks",)

    def __init__(self, slots: Iterable[VariableSlot]) -> None:
        self._locks = [slot.lock for slot in sorted(set(slots), key=lambda slot: slot.key)]

    def __enter__(self) -> None:
        taken = 0
        try:
            for lock in self._locks:
                lock.acquire()
                taken += 1
        except BaseException:
            # Ctrl-C in the main thread may come between two locks.
            self._release_locks(self._locks[:taken])
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._release_locks(self._locks)

    @staticmethod
    def _release_locks(locks: list[concurrency.Lock]) -> None:
        # The first lock is released last: a stage that waits there then finds the others free.
        for lock in reversed(locks):
            lock.release()


class Store:
    """The state of a task.

    ``lock`` guards the fields of the slots and the rest of the store: held for moments, never
    during computation or I/O. A stage is atomic because the stage claims its variables.

    Args:
        ledger: count of the bytes of variables and of resources.
        environment: surroundings of the run record.

    Examples:
        >>> store = Store()
        >>> spec = TensorSpec((2,), np.dtype("float32"))
        >>> _ = store.replace({("", "w"): (np.ones(2, "float32"), spec)})
        >>> store.snapshot()
        {('', 'w'): array([1., 1.], dtype=float32)}
    """

    def __init__(
        self, ledger: Ledger | None = None, environment: TaskEnvironment | None = None
    ) -> None:
        self.lock = concurrency.Lock()
        self.changed = concurrency.Condition(self.lock)
        """Notified when a variable becomes initialised, a container is cleared or the run record changes."""
        # Slots are never removed: stages hold them, and look up no names.
        self._slots: dict[Key, VariableSlot] = {}
        self.run = RunRecord(
            self.changed,
            lambda: any(s.value is not None or s.lost for s in self._slots.values()),
            environment,
        )
        self._resources: dict[Key, Resource] = {}
        self.ledger = ledger or Ledger()

    def slot(self, container: str, name: str) -> VariableSlot:
        """Returns the slot of a variable, and makes an empty slot for a new variable."""
        with self.lock:
            key = (container, name)
            if key not in self._slots:
                self._slots[key] = VariableSlot(key)
                self.ledger.reserve(NOBODY, _name_bytes(key), checked=False)
            return self._slots[key]

    def count(self, slots: Iterable[tuple[VariableSlot, int]], *, checked: bool = False) -> None:
        """Counts the bytes of variables in the ledger, in place of the last count.

        The variables must be claimed. Variables belong to no session: one session initialises a
        model that all train.

        Args:
            slots: The slots, and the bytes of the present or coming values.
            checked: True refuses values over the limit ``task_bytes``.

        Raises:
            ResourceExhaustedError: The values would be over the limit; nothing is counted.
        """
        wanted = dict(slots)
        more = sum(wanted.values()) - sum(slot.counted for slot in wanted)
        if more > 0:
            self.ledger.reserve(NOBODY, more, checked=checked)
        elif more:
            self.ledger.release(NOBODY, -more)
        for slot, count in wanted.items():
            slot.counted = count

    def uninitialized(self, keys: Iterable[Key]) -> list[str]:
        """Returns the names of the variables without a value, in the order of ``keys``."""
        with self.lock:
            return self._without_value(keys)

    def _without_value(self, keys: Iterable[Key]) -> list[str]:
        return [key[1] for key in keys if key not in self._slots or self._slots[key].value is None]

    def check_initialized(self, keys: Iterable[Key], task: str) -> None:
        """Checks that variables have values.

        Raises:
            FailedPreconditionError: Some variables are not initialised; the error names them.
            AbortedError: The value of a variable was lost.
        """
        with self.lock:
            slots = [self._slots.get(key) or VariableSlot(key) for key in keys]
            empty = [slot for slot in slots if slot.value is None]
        for slot in empty:
            if slot.lost:
                raise slot.missing(task)
        if empty:
            raise _uninitialized_error(empty, task)

    def wait_initialized(
        self, keys: Iterable[Key], timeout: float, cancelled: Cancellation
    ) -> list[str]:
        """Waits until all ``keys`` have values; returns the names without a value after ``timeout`` seconds."""
        keys = list(keys)
        with self.changed:
            until = concurrency.monotonic() + timeout
            cancelled.wait_for(
                self.changed,
                lambda: not self._without_value(keys),
                "waiting for initialised variables",
                until,
            )
            return self._without_value(keys)

    @uninterrupted
    def snapshot(self, keys: Iterable[Key] | None = None) -> dict[Key, Array]:
        """Returns the values of variables at one instant, by reference: in microseconds for any size.

        The arrays are read-only views. While a view lives, the next update of the variable writes
        elsewhere.

        Args:
            keys: keys of the variables; all initialised variables by default.

        Raises:
            FailedPreconditionError: A variable is not initialised.
            AbortedError: The value of a variable was lost.
        """
        with self.lock:
            chosen = (
                [self._find_initialized(k) for k in keys]
                if keys is not None
                else list(self._slots.values())
            )
        # A claim waits for updates under way, so that the values below are those of one instant.
        with VariableClaim(chosen), self.lock:
            taken = self._take_references(
                [self._find_initialized(k) for k in keys] if keys is not None else chosen
            )
        try:
            return {slot.key: np.asarray(value) for slot, value in taken}
        except Exception as error:
            # An update that was still running has failed.
            self.drop_lost((slot for slot, _ in taken), f"it was lost: {one_line(error)}")
            for slot, _ in taken:
                if slot.lost:
                    raise slot.missing() from error
            raise
        finally:
            self.release(slot for slot, _ in taken)

    def _find_initialized(self, key: Key) -> VariableSlot:
        slot = self._slots.get(key) or VariableSlot(key)
        if slot.value is None:
            raise slot.missing()
        return slot

    @staticmethod
    def _take_references(slots: Iterable[VariableSlot]) -> list[tuple[VariableSlot, AnyArray]]:
        taken = [(slot, slot.value) for slot in slots if slot.value is not None]
        for slot, _ in taken:
            # Until the release no update may donate the array.
            slot.readers += 1
        return taken

    @uninterrupted
    def hold(self) -> tuple[list[tuple[VariableSlot, AnyArray]], RunState, list[Key]]:
        """Returns the store as of one instant: references to the values, the run record, names of the resources.

        The references count in ``VariableSlot.readers``: pin what is needed, then ``release`` the slots.
        """
        while True:
            with self.lock:
                slots = list(self._slots.values())
            with VariableClaim(slots), self.lock:
                # A variable was made after the list of slots, and an instant has all variables.
                if len(slots) < len(self._slots):
                    continue
                return self._take_references(slots), self.run.state(), list(self._resources)

    def release(self, slots: Iterable[VariableSlot]) -> None:
        """Releases references that are counted in ``VariableSlot.readers``."""
        with self.lock:
            for slot in slots:
                slot.readers -= 1

    def values(self, keys: Iterable[Key]) -> Values:
        """Returns the present values of ``keys``, also during an update; keys without a value are left out."""
        with self.lock:
            # A weak reference keeps no memory. An update makes another array, and so shows a
            # change.
            held = [(key, self._slots[key].value) for key in keys if key in self._slots]
        return {key: weakref.ref(value) for key, value in held if value is not None}

    @uninterrupted
    def replace(
        self,
        values: dict[Key, tuple[AnyArray, TensorSpec]],
        check: Callable[[], None] | None = None,
    ) -> Values:
        """Replaces the values of several variables at once (a restore), and returns the new values.

        String arrays are made read-only: readers get a variable's own array.

        Args:
            values: value and spec, by key.
            check: called under the lock just before. An exception keeps the old values.
        """
        # The slots are made before the claim, because a slot is made under the store's lock.
        slots = [self.slot(*key) for key in values]
        with VariableClaim(slots), self.lock:
            if check is not None:
                check()
            for slot in slots:
                value, spec = values[slot.key]
                # Snapshots give out the array itself, as JAX arrays have no strings.
                if isinstance(value, np.ndarray) and spec.is_string:
                    value.flags.writeable = False
                slot.value, slot.spec, slot.lost = value, spec, ""
            # A restore is not refused for its size: the memory is in use already.
            self.count((slot, nbytes([values[slot.key][0]])) for slot in slots)
            self.changed.notify_all()
            return {key: weakref.ref(value) for key, (value, _) in values.items()}

    @uninterrupted
    def drop_lost(self, slots: Iterable[VariableSlot], why: str) -> list[str]:
        """Makes variables uninitialised after a program that had their arrays has failed.

        Args:
            slots: the slots of the program's variables.
            why: the reason, for the error of later reads.

        Returns:
            The names of the variables without a value, lost now or before.
        """
        slots = list(slots)
        # A running stage may be about to give the variable a new array: its claim ends first.
        with VariableClaim(slots):
            # A stage that ran meanwhile may have given the variable a new value, which stays.
            gone = [slot for slot in slots if _is_gone(slot.value)]
            with self.lock:
                for slot in gone:
                    slot.value, slot.spec, slot.lost = None, None, why
            # The bytes that the program should have made were counted before the run.
            self.count(
                (slot, nbytes([slot.value] if slot.value is not None else ())) for slot in slots
            )
        return [slot.key[1] for slot in slots if slot.lost]

    def validate(self) -> None:
        """Asserts the invariants; for tests, while no stage runs."""
        with self.lock:
            for key, slot in self._slots.items():
                assert slot.key == key and slot.readers >= 0
                assert not slot.lock.locked(), "a claim has outlived its stage"
                assert not slot.lost or slot.value is None
                assert (slot.value is None) == (slot.spec is None)
                assert slot.value is not None or not slot.counted, "bytes without a value"
                if slot.value is not None and slot.spec is not None:
                    assert slot.value.shape == slot.spec.shape and not _is_gone(slot.value)
                    # The length of strings changes with each update, and is counted at a restore
                    # only.
                    assert slot.spec.is_string or slot.counted == nbytes([slot.value])
            counted = sum(slot.counted for slot in self._slots.values())
            names = sum(map(_name_bytes, [*self._slots, *self._resources]))
            # Elements of queues are counted for nobody, too.
            assert self.ledger.of(NOBODY) >= counted + names, (
                "bytes of a variable were released twice"
            )
        self.ledger.validate()
        self.run.validate()

    def variables(self) -> list[tuple[Key, TensorSpec]]:
        """Returns the key and the spec of every initialised variable."""
        with self.lock:
            return [
                (s.key, s.spec)
                for s in self._slots.values()
                if s.value is not None and s.spec is not None
            ]

    def resource(self, container: str, name: str, make: Callable[[], Resource]) -> Resource:
        """Returns the named resource, which ``make`` makes at the first call."""
        with self.lock:
            key = (container, name)
            if key not in self._resources:
                self._resources[key] = make()
                self.ledger.reserve(NOBODY, _name_bytes(key), checked=False)
            return self._resources[key]

    def resources(self) -> list[Resource]:
        """Returns all named resources."""
        with self.lock:
            return list(self._resources.values())

    @uninterrupted
    def clear(self, containers: Iterable[str] | None = None) -> None:
        """Forgets the values of all variables and all resources, of ``containers`` only when given."""
        chosen = None if containers is None else set(containers)
        with self.lock:
            slots = [
                slot for key, slot in self._slots.items() if chosen is None or key[0] in chosen
            ]
        with VariableClaim(slots), self.lock:
            for slot in slots:
                slot.value, slot.spec, slot.lost = None, None, ""
            self.count((slot, 0) for slot in slots)
            # The slots stay, because stages of sessions hold them.
            dropped = [
                (k, r) for k, r in self._resources.items() if chosen is None or k[0] in chosen
            ]
            for key, _ in dropped:
                del self._resources[key]
                self.ledger.release(NOBODY, _name_bytes(key))
            self.changed.notify_all()
        # Without the lock: the end of a wait may need the store.
        for _, resource in dropped:
            resource.clear()


def _name_bytes(key: Key) -> int:
    """Returns the bytes of a named object beside its value."""
    return 256 + len(key[0]) + len(key[1])


def _is_gone(value: object) -> bool:
    """Returns True if an array was donated to a program, or comes from a failed program."""
    if not isinstance(value, jax.Array):
        return False
    try:
        # A computation that failed raises only when its result is waited for.
        return value.is_deleted() or value.block_until_ready() is None
    except Exception:
        # The array raises the error of the program, which may be of any type.
        return True
