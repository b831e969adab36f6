"""The table of leases against a model in plain Python, and any order of what happens to it."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.data import lease_table as lt

SLOTS, BATCHES = 8, 3
LEASED, MARKED, RELEASED = jax.jit(lt.leased), jax.jit(lt.marked), jax.jit(lt.released)


class Model:
    """What the table should do: sets and dictionaries, without slots, bits or laps."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.blocks = -(-batches // BATCHES)
        self.done: set[int] = set()
        self.owner: dict[int, int] = {}
        self.lease: dict[int, int] = {}
        self.leases = 0
        self.known = 0  # the first block when somebody leased last

    def numbers(self, block: int) -> set[int]:
        return set(range(block * BATCHES, min((block + 1) * BATCHES, self.batches)))

    def take(self, owner: int) -> int:
        undone = [b for b in range(self.blocks) if not self.numbers(b) <= self.done]
        self.known = min(undone, default=self.blocks)
        if not undone:
            return lt.END
        for wanted in (owner, None):
            for block in undone:
                if block < undone[0] + SLOTS and self.owner.get(block) == wanted:
                    self.leases += 1
                    self.owner[block], self.lease[block] = owner, self.leases
                    return block
        return lt.WAIT

    def mark(self, number: int) -> None:
        if self.known <= number // BATCHES < self.known + SLOTS:
            self.done.add(number)

    def release(self, owner: int, leases: int) -> None:
        self.owner = {b: o for b, o in self.owner.items() if o != owner or self.lease[b] > leases}


class Table:
    """The real one."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.table = lt.new_table(SLOTS, (1, 2, 3, 4))

    def take(self, owner: int) -> tuple[int, int]:
        whole, rest = (1 << BATCHES) - 1, self.batches % BATCHES
        asked = np.array(
            [owner, -(-self.batches // BATCHES), whole, (1 << rest) - 1 if rest else whole],
            np.int32,
        )
        self.table, told = LEASED(self.table, *asked)
        return int(told[0]), int(told[1])


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 80),
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(0, 3)),
            st.tuples(st.just("mark"), st.integers(0, 79)),
            st.tuples(st.just("release"), st.integers(0, 3), st.integers(0, 60)),
        ),
        max_size=150,
    ),
)
def test_table_equals_its_model(batches: int, history: list[tuple]) -> None:
    """After any history of takes, marks and releases the table equals a model in plain Python."""
    table, model = Table(batches), Model(batches)
    for what, number, *rest in history:
        if what == "take":
            block, marks = table.take(number)
            assert block == model.take(number)
            if block >= 0:
                trained = {block * BATCHES + i for i in range(BATCHES) if marks >> i & 1}
                assert trained == model.numbers(block) & model.done
        elif what == "mark" and number < batches:
            table.table = MARKED(table.table, lt.mark(SLOTS, number, BATCHES))
            model.mark(number)
        elif what == "release":
            table.table = RELEASED(
                table.table, np.array([number, lt.FREE], np.int32), np.int32(rest[0])
            )
            model.release(number, rest[0])
        lt.validate(np.asarray(table.table))
    assert lt.leases_of(np.asarray(table.table)) == model.leases
    assert lt.likeness_of(np.asarray(table.table)) == (1, 2, 3, 4)


def test_workers_see_every_batch_once() -> None:
    """Workers that lease blocks and mark batches see every batch once."""
    table, seen = Table(1000), []
    at_work: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while at_work:
        for worker in list(at_work):
            if not at_work[worker]:
                block, marks = table.take(worker)
                if block == lt.END:
                    del at_work[worker]
                    continue
                numbers = range(block * BATCHES, (block + 1) * BATCHES) if block >= 0 else ()
                at_work[worker] = [
                    n for n in numbers if not marks >> (n - block * BATCHES) & 1 and n < 1000
                ]
                continue
            number = at_work[worker].pop()
            seen.append(number)
            table.table = MARKED(table.table, lt.mark(SLOTS, number, BATCHES))
    assert sorted(seen) == list(range(1000))


def test_late_mark_spares_the_next_block() -> None:
    """A late mark of a finished block does not mark the block that now has its slot."""
    table = Table(10**6)
    for number in range(SLOTS * BATCHES):
        table.table = MARKED(table.table, lt.mark(SLOTS, number, BATCHES))
    assert table.take(0) == (SLOTS, 0)
    table.table = MARKED(table.table, lt.mark(SLOTS, 0, BATCHES))  # a late one, of block 0
    assert table.take(0) == (SLOTS, 0)


def test_marks_of_workers_combine() -> None:
    """The marks of several workers combine bit by bit."""
    table = Table(100)
    joined = lt.mark(SLOTS, 0, BATCHES) | lt.mark(SLOTS, 2, BATCHES) | lt.mark(SLOTS, 7, BATCHES)
    table.table = MARKED(table.table, joined)
    assert table.take(0) == (0, 0b101) and table.take(1) == (1, 0) and table.take(2) == (2, 0b10)


def test_returned_worker_keeps_its_lease() -> None:
    """A worker that has come back keeps the lease that it took again."""
    table = Table(100)
    assert table.take(5) == (0, 0)
    before = lt.leases_of(np.asarray(table.table))
    assert table.take(5) == (0, 0)  # started again: it goes on with what it had
    table.table = RELEASED(table.table, np.array([5, lt.FREE], np.int32), np.int32(before))
    assert table.take(6) == (1, 0)
    assert lt.owners_of(np.asarray(table.table)) == {5, 6}


def test_more_epochs_finish_last_block() -> None:
    """A run that continues with more epochs deals out the rest of its last block."""
    table = Table(4)
    for number in range(4):
        table.table = MARKED(table.table, lt.mark(SLOTS, number, BATCHES))
    assert table.take(0) == (lt.END, 0)
    table.batches = 9
    assert table.take(0) == (1, 0b1) and table.take(1) == (2, 0) and table.take(2) == (lt.WAIT, 0)


def test_fewer_epochs_end_last_block() -> None:
    """A run that continues with fewer epochs ends although its last block was trained beyond its new end."""
    table = Table(6)
    for number in range(5):
        table.table = MARKED(table.table, lt.mark(SLOTS, number, BATCHES))
    table.batches = 4
    assert table.take(0) == (lt.END, 0)
