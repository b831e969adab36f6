"""The store under several threads: what claims of variables exclude, and what they do not."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import runtime as rt
from runtime.state.ledger import NOBODY, Ledger
from runtime.state.store import Resource, Store, VariableClaim, VariableSlot
from runtime.tensor_spec import TensorSpec

TURNS = 300
SECS = 60.0
SCALAR = TensorSpec((), jnp.float32)


def _store(*names: str) -> tuple[Store, list[VariableSlot]]:
    store = Store()
    store.replace({("", name): (jnp.zeros(()), SCALAR) for name in names})
    return store, [store.slot("", name) for name in names]


def _together(*bodies: Callable[[], None]) -> None:
    """Runs each body ``TURNS`` times on a thread of its own; what one raises, this raises."""
    errors: list[BaseException] = []

    def run(body: Callable[[], None]) -> None:
        try:
            for _ in range(TURNS):
                body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECS)
    assert not any(thread.is_alive() for thread in threads), "the claims wait for each other"
    if errors:
        raise errors[0]


def _update(store: Store, slots: list[VariableSlot]) -> Callable[[], None]:
    """A stage that adds 1 to variables, one after the other."""
    add = jax.jit(lambda v: v + 1)
    claim = VariableClaim(slots)

    def body() -> None:
        with claim:
            for slot in slots:
                slot.value = add(slot.value)

    return body


def test_reads_hold_whole_updates_only() -> None:
    """A read at one instant holds whole updates only."""
    store, slots = _store("a", "b", "c")

    def read() -> None:
        assert len({float(v) for v in store.snapshot().values()}) == 1
        taken, _, _ = store.hold()
        store.release(slot for slot, _ in taken)
        assert len({float(v) for _, v in taken}) == 1

    _together(_update(store, slots), _update(store, slots[::-1]), read)
    assert [float(slot.value) for slot in slots] == [2 * TURNS] * 3
    assert [slot.readers for slot in slots] == [0] * 3
    store.validate()


def test_overlapping_claims_end() -> None:
    """Claims of variables that overlap in any order end."""
    store, (a, b, c) = _store("a", "b", "c")
    _together(*(_update(store, slots) for slots in ([a, b], [b, a], [b, c], [c, a], [c, b, a])))
    assert [float(slot.value) for slot in (a, b, c)] == [4 * TURNS, 4 * TURNS, 3 * TURNS]
    store.validate()


def test_claim_holds_up_its_readers_only() -> None:
    """A claim holds up only the readers of its own variables."""
    store, (a, b) = _store("a", "b")
    with VariableClaim([a]):
        assert store.snapshot([b.key]) == {b.key: 0}
        assert store.uninitialized([a.key, b.key]) == []
        reader = threading.Thread(target=store.snapshot, args=([a.key],), daemon=True)
        reader.start()
        reader.join(0.05)
        assert reader.is_alive()
    reader.join(SECS)
    assert not reader.is_alive()


def test_empty_variable_leaves_nothing_claimed() -> None:
    """A snapshot names an empty variable and leaves no variable claimed."""
    store, (a, b) = _store("a", "b")
    b.value = None
    with pytest.raises(rt.errors.FailedPreconditionError, match="uninitialized value b"):
        store.snapshot([a.key, b.key])
    assert a.readers == 0
    assert a.lock.acquire(blocking=False) and b.lock.acquire(blocking=False)


def test_claim_may_repeat_a_variable() -> None:
    """A variable may come twice in a claim."""
    _, (a,) = _store("a")
    with VariableClaim([a, a]):
        assert a.lock.locked()
    assert not a.lock.locked()


STORE_TURNS = st.tuples(
    st.sampled_from(
        ["replace", "snapshot", "hold", "release", "donate", "drop", "clear", "resource"]
    ),
    st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True),
)


@given(st.lists(STORE_TURNS, max_size=20))
def test_store_counts_what_it_keeps(turns: list[Any]) -> None:
    """Values, references and bytes agree after any order of operations."""
    store, held = Store(), []
    slots = [store.slot(name, name) for name in "abc"]
    empty = store.ledger.of(NOBODY)
    values: dict[str, float] = {}
    lost: set[str] = set()
    for number, (what, names) in enumerate(turns):
        keys = [(name, name) for name in names]
        if what == "replace":
            store.replace(
                {
                    key: (jnp.full((2,), float(number)), TensorSpec((2,), jnp.float32))
                    for key in keys
                }
            )
            values |= dict.fromkeys(names, float(number))
            lost -= set(names)
        elif what == "snapshot":
            try:
                found = store.snapshot(keys)
                assert {key[0]: value[0] for key, value in found.items()} == {
                    name: values[name] for name in names
                }
            except rt.errors.AbortedError:
                assert lost & set(names)
            except rt.errors.FailedPreconditionError:
                assert set(names) - values.keys()
        elif what == "hold":
            held += [slot for slot, _ in store.hold()[0]]
        elif what == "release" and held:
            store.release([held.pop()])
        elif what == "donate":
            for slot in (store.slot(*key) for key in keys):
                if isinstance(slot.value, jax.Array):
                    slot.value.delete()
            assert sorted(
                store.drop_lost([store.slot(*key) for key in keys], "its program failed")
            ) == sorted(
                name
                for name in names
                if name in lost or values.pop(name, None) is not None and not lost.add(name)
            )
        elif what == "drop":
            assert set(
                store.drop_lost([store.slot(*key) for key in keys], "for no reason")
            ) == lost & set(names)
        elif what == "clear":
            store.clear(names)
            lost -= set(names)
            values = {name: value for name, value in values.items() if name not in names}
        elif what == "resource":
            assert store.resource(*keys[0], Resource) is store.resource(*keys[0], Resource)
        store.validate()
        assert sum(slot.readers for slot in slots) == len(held)
        assert sum(slot.counted for slot in slots) == 8 * len(values)
    store.clear()
    store.validate()
    assert store.ledger.of(NOBODY) == empty, "bytes of values that are gone are counted"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["reserve", "release", "end"]), st.integers(0, 2), st.integers(0, 9)
        )
    )
)
def test_ledger_loses_no_byte(turns: list[Any]) -> None:
    """Bytes that are reserved are counted until they are released, also after the end of their session."""
    ledger, kept = Ledger(), {0: 0, 1: 0, 2: 0}
    for what, session, count in turns:
        if what == "reserve":
            ledger.reserve(session, count)
            kept[session] += count
        elif what == "release" and kept[session] >= count:
            ledger.release(session, count)
            kept[session] -= count
        elif what == "end" and session != NOBODY:
            ledger.end(session)
        ledger.validate()
        assert sum(ledger.of(number) for number in kept) == sum(kept.values())
