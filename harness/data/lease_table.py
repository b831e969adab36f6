"""The table of leases of ``DataShards``: one variable beside the global step, and the pure functions of its changes.

Batches are numbered from 0 in the order in which they are dealt out, through all epochs. ``BLOCK``
of them, one after the other, are a block. The table is int32[4, slots] and holds the blocks from
``first`` on, the lowest one that is not done, each in the slot of its number modulo the number of
slots:

    row 0   the number of the worker that has leased the block, from 0, or FREE
    row 1   the number of that lease: leases are counted
    row 2   a bit for each batch of the block that has been trained
    row 3   the number of the first block, the number of leases, and the numbers of the data set
"""

import jax
import jax.numpy as jnp
import numpy as np

from runtime.lowlevel import Array

FREE, WAIT, END = -1, -1, -2
BLOCK = 15
"""Batches in a block at most: the bits of a slot are marks below 2^16, and the lap of the block above."""
MOST_BLOCKS = 2**30
LIKENESS = 4
"""Count of the numbers that tell one data set from another."""
_OWNER, _LEASE, _MARKS, _HEAD = range(4)
_LAPS = 2**14
assert BLOCK < 16 and _LAPS << 16 < 2**31, "a mark is an int32"


def new_table(slots: int, likeness: tuple[int, ...]) -> Array:
    """Returns the table before the first lease, int32[4, slots].

    Args:
        slots: Number of blocks in the table.
        likeness: ``LIKENESS`` numbers of the data set. The 31 lowest bits of each are kept.
    """
    assert len(likeness) == LIKENESS and slots >= 2 + LIKENESS, "the head is cut off"
    table = np.zeros((4, slots), np.int32)
    table[_OWNER] = FREE
    table[_HEAD, 2 : 2 + LIKENESS] = [number & 0x7FFFFFFF for number in likeness]
    return table


def likeness_of(table: Array) -> tuple[int, ...]:
    """Returns the numbers of the data set, of ``new_table``."""
    return tuple(int(number) for number in table[_HEAD, 2 : 2 + LIKENESS])


def leases_of(table: Array) -> int:
    """Returns the number of leases so far."""
    return int(table[_HEAD, 1])


def owners_of(table: Array) -> set[int]:
    """Returns the numbers of the workers that have leased a block."""
    return {int(owner) for owner in np.unique(table[_OWNER])} - {FREE}


def mark(slots: int, number: int, block_batches: int) -> Array:
    """Returns the mark of a batch for ``marked``, int32[slots], with which a training step is fed.

    The marks of several workers may be joined bit by bit (or).

    Args:
        slots: Number of slots in the table.
        number: Number of the batch.
        block_batches: Number of batches in a block.
    """
    block, bit = divmod(number, block_batches)
    assert bit < BLOCK, "a mark has a bit for each batch"
    marks = np.zeros(slots, np.int32)
    # The lap tells a block from the block that had the slot before.
    marks[block % slots] = (block // slots % _LAPS) << 16 | 1 << bit
    return marks


def marked(table: jax.Array, marks: jax.Array) -> jax.Array:
    """Returns the table after batches have been trained.

    Marks of blocks that are done, or not in the table yet, are ignored.

    Args:
        table: Table before, int32[4, slots].
        marks: Marks, int32[slots], of ``mark``.
    """
    slots = table.shape[1]
    laps = jax.lax.rem(jax.lax.div(_block_numbers(table), slots), _LAPS)
    added = jnp.where(marks >> 16 == laps, marks & 0xFFFF, 0)
    return table.at[_MARKS].set(table[_MARKS] | added)


def leased(
    table: jax.Array, owner: jax.Array, blocks: jax.Array, whole: jax.Array, last: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Leases a block: the block that the owner has already, else the lowest free block.

    Args:
        table: Table before, int32[4, slots].
        owner: Number of the worker that asks, int32.
        blocks: Number of blocks in all epochs, int32.
        whole: Marks of a block that is done, int32.
        last: Marks of the last block when done, int32. That block may have fewer batches.

    Returns:
        The table after, and int32[2]: the number of the block, and the marks of its batches that
        have been trained. The number is WAIT when other workers have all blocks that are left, and
        END when all blocks are done.
    """
    slots = table.shape[1]
    first, numbers, owners, marks = _recycle_slots(table, blocks, whole)
    # A run that had more epochs may have trained more batches of the last block.
    wanted = jnp.where(numbers == blocks - 1, last, whole)
    to_do = (numbers < blocks) & (marks & wanted != wanted)
    # The block that the owner has comes first: a worker that asks again has lost the answer, not
    # the lease.
    none = jnp.int32(MOST_BLOCKS)
    own = jnp.min(jnp.where(to_do & (owners == owner), numbers, none))
    free = jnp.min(jnp.where(to_do & (owners == FREE), numbers, none))
    block = jnp.where(own < none, own, free)
    chosen = (numbers == block) & (block < none)
    count = table[_HEAD, 1] + jnp.where(block < none, 1, 0)
    head = jnp.where(
        jnp.arange(slots) == 0, first, jnp.where(jnp.arange(slots) == 1, count, table[_HEAD])
    )
    leases = jnp.where(chosen, count, table[_LEASE])
    after = jnp.stack([jnp.where(chosen, owner, owners), leases, marks, head])
    told = jnp.where(block < none, block, jnp.where(jnp.any(to_do), WAIT, END))
    return after, jnp.stack([told, jnp.sum(jnp.where(chosen, marks, 0))])


def _recycle_slots(
    table: jax.Array, blocks: jax.Array, whole: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gives the slots of blocks that are done to the next blocks.

    Returns the first block that is not done, and for each slot the number of its block, the owner
    and the marks.
    """
    numbers = _block_numbers(table)
    slots = table.shape[1]
    # A last block with fewer batches stays where it is: with more epochs it has the rest of them.
    first = jnp.min(
        jnp.where((numbers >= blocks) | (table[_MARKS] != whole), numbers, table[_HEAD, 0] + slots)
    )
    done = numbers < first
    owners = jnp.where(done, FREE, table[_OWNER])
    return (
        first,
        jnp.where(done, numbers + slots, numbers),
        owners,
        jnp.where(done, 0, table[_MARKS]),
    )


def released(table: jax.Array, owners: jax.Array, leases: jax.Array) -> jax.Array:
    """Returns the table after some workers have given their leases back.

    Trained batches stay trained.

    Args:
        table: Table before, int32[4, slots].
        owners: Numbers of the workers, int32[n]; FREE stands for no worker.
        leases: Number of the last lease that is given back, int32.
    """
    theirs = jnp.any(table[_OWNER][:, None] == owners[None, :], axis=1) & (table[_LEASE] <= leases)
    return table.at[_OWNER].set(jnp.where(theirs, FREE, table[_OWNER]))


def validate(table: Array) -> None:
    """Asserts the invariants of a table; for tests."""
    first, count = int(table[_HEAD, 0]), leases_of(table)
    assert first >= 0 and table[_OWNER].min() >= FREE
    assert 0 <= table[_MARKS].min() and table[_MARKS].max() < 1 << BLOCK
    leases = table[_LEASE][table[_OWNER] != FREE]
    assert len(np.unique(leases)) == len(leases), "two blocks have one lease"
    assert not leases.size or 0 < leases.min() <= leases.max() <= count


def _block_numbers(table: jax.Array) -> jax.Array:
    """Returns the number of the block in each slot, int32[slots]."""
    slots, first = table.shape[1], table[_HEAD, 0]
    return first + jax.lax.rem(
        jnp.arange(slots, dtype=jnp.int32) - jax.lax.rem(first, slots) + slots, slots
    )
