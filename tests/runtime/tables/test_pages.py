"""A page that changes in place only while nobody else holds it."""

from typing import Any

import numpy as np
import pytest

from runtime.state.store import Store, VariableClaim, VariableSlot
from runtime.tensor_spec import TensorSpec

KEY = ("", "table/page_0")


def _change(store: Store, slot: VariableSlot) -> int:
    """Adds 1 to the page as a push does; returns the address of its memory."""
    with VariableClaim([slot]):
        memory = slot.take_over()
        memory += 1
        with store.lock:
            slot.value = memory.view()
    return int(memory.ctypes.data)


def _page() -> tuple[Store, VariableSlot]:
    store, value = Store(), np.zeros((4, 2), np.float32)
    store.replace({KEY: (value, TensorSpec.of(value))})
    return store, store.slot(*KEY)


def test_page_alone_changes_in_place() -> None:
    """A page that nobody else holds keeps its memory, and yet is another object."""
    store, slot = _page()
    # The first change takes a copy: the array came from elsewhere.
    first, before = _change(store, slot), store.values([KEY])
    assert _change(store, slot) == first
    assert before[KEY]() is not slot.value
    np.testing.assert_array_equal(np.asarray(slot.value), 2)


@pytest.mark.parametrize("holder", ["save", "backup", "reader", "view", "all"])
def test_held_page_is_copied(holder: str) -> None:
    """A save, a backup and a reader keep what they hold, one or all at the same moment."""
    store, slot = _page()
    first = _change(store, slot)
    held: list[Any] = []
    if holder in ("save", "all"):
        held.append(store.snapshot([KEY])[KEY])
    if holder in ("backup", "all"):
        references, _, _ = store.hold()
        held.append(references[0][1])
    if holder in ("reader", "all"):
        held.append(slot.value)
    if holder in ("view", "all"):
        held.append(np.asarray(slot.value)[1:])
    second = _change(store, slot)
    assert second != first and all(np.array_equal(value, np.ones_like(value)) for value in held)
    if holder in ("backup", "all"):
        store.release([slot])
        references.clear()
    held.clear()
    # The others are gone, so the copy is changed in place.
    assert _change(store, slot) == second
    np.testing.assert_array_equal(np.asarray(slot.value), 3)
    store.validate()
