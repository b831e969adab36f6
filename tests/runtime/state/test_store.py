"""The store under several threads: what claims of variables exclude, and what they do not."""

import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import runtime as rt
from runtime.state.store import Claim, Slot, Store
from runtime.tensor_spec import TensorSpec

TURNS = 300
SECS = 60.0


def _store(*names: str) -> tuple[Store, list[Slot]]:
    store = Store()
    slots = [store.slot("", name) for name in names]
    for slot in slots:
        slot.value, slot.spec = jnp.zeros(()), TensorSpec((), jnp.float32)
    return store, slots


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


def _update(store: Store, slots: list[Slot]) -> Callable[[], None]:
    """A stage that adds 1 to variables, one after the other."""
    add = jax.jit(lambda v: v + 1)
    claim = Claim(slots)

    def body() -> None:
        with claim:
            for slot in slots:
                slot.value = add(slot.value)

    return body


def test_what_is_read_at_one_instant_holds_whole_updates_only() -> None:
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


def test_claims_that_overlap_in_any_order_end() -> None:
    store, (a, b, c) = _store("a", "b", "c")
    _together(*(_update(store, slots) for slots in ([a, b], [b, a], [b, c], [c, a], [c, b, a])))
    assert [float(slot.value) for slot in (a, b, c)] == [4 * TURNS, 4 * TURNS, 3 * TURNS]
    store.validate()


def test_a_claim_holds_up_only_those_who_need_its_variables() -> None:
    store, (a, b) = _store("a", "b")
    with Claim([a]):
        assert store.snapshot([b.key]) == {b.key: 0}
        assert store.uninitialized([a.key, b.key]) == []
        reader = threading.Thread(target=store.snapshot, args=([a.key],), daemon=True)
        reader.start()
        reader.join(0.05)
        assert reader.is_alive()
    reader.join(SECS)
    assert not reader.is_alive()


def test_an_empty_variable_is_named_and_leaves_nothing_claimed() -> None:
    store, (a, b) = _store("a", "b")
    b.value = None
    with pytest.raises(rt.errors.FailedPreconditionError, match="uninitialized value b"):
        store.snapshot([a.key, b.key])
    assert a.readers == 0
    assert a.lock.acquire(blocking=False) and b.lock.acquire(blocking=False)


def test_a_variable_may_come_twice_in_a_claim() -> None:
    _, (a,) = _store("a")
    with Claim([a, a]):
        assert a.lock.locked()
    assert not a.lock.locked()
