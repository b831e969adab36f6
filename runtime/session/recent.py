"""Recent values: the plans and counts of a session, the least recently used of which are dropped."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from runtime import concurrency

_Value = TypeVar("_Value")

MOST = 256
"""Values that are kept. The least recently used value is dropped first."""


class RecentValues(Generic[_Value]):
    """The values by key that were used last, ``MOST`` at most."""

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        self._items: OrderedDict[Hashable, _Value] = OrderedDict()

    def find(self, key: Hashable) -> _Value | None:
        """Returns a value, None if there is none."""
        found = self._items.get(key)
        # Each step looks up its plan, so the lookup takes no lock. Another thread may drop the
        # value meanwhile. The caller still has the value.
        try:
            if found is not None:
                self._items.move_to_end(key)
        except KeyError:
            return found
        return found

    def keep(self, key: Hashable, value: _Value) -> None:
        """Adds a value, and drops the value that was not used for the longest time."""
        with self._lock:
            self._items[key] = value
            while len(self._items) > MOST:
                self._items.popitem(last=False)

    def list_items(self) -> dict[Hashable, _Value]:
        """Returns all values by key, the values that were used last at the end."""
        with self._lock:
            return dict(self._items)
