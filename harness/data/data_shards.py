"""DataShards: a data set is dealt out, block by block, to workers that come and go."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from absl import logging

import runtime as rt
from harness.coordinator import Coordinator
from harness.data import lease_table
from harness.optimizers.optimizer import AnyOptimizer, GradientAndVariable, WrappedOptimizer, updates_of
from harness.training.global_step import get_or_create_global_step
from harness.training.lifecycle import ELASTIC
from harness.training.managed_session import is_chief
from harness.training.monitored_session import MonitoredSession
from harness.training.session_manager import LOST_CONTACT
from runtime.lowlevel import Array, RunRecords, RunRecordView

LEASE_SECS = 10.0
"""A worker without a sign of life for so long loses its lease."""
_POLL_SECS = 0.1
_AT_ONCE = 32
_LEASES = np.iinfo(np.int32).max
_SAID = ("num_examples", "batch_size", "block_batches", "seed", "shuffle")

_RANGES = {
    "num_examples": (1, 2**62),
    "batch_size": (1, 2**31 - 1),
    "block_batches": (1, lease_table.BLOCK),
    "slots": (8, 2**20),
    "seed": (0, 2**62),
}
"""By argument of ``DataShards``: the least and the greatest number that is taken."""


@dataclass(frozen=True, eq=False)
class Batch:
    """The examples of one training step.

    Attributes:
        number: of the batch, from 0, through all epochs.
        epoch: how often the data set has been gone through before it: 1.5 in the middle of the second time.
        examples: int64[batch_size], indices of the examples, below ``num_examples``.
        feed: what its training step must be fed besides: with the gradients it says that these examples are done.
    """

    number: int
    epoch: float
    examples: Array
    feed: Mapping[rt.Tensor, Array]


class DataShards:
    """Deals a data set out to workers that come and go: every example once in every epoch.

        shards = harness.DataShards(len(images), batch_size=100, epochs=20)
        optimizer = shards.counted(harness.Optimizer(optax.adam(1e-3)))     # SyncReplicas goes around this
        train_op = optimizer.minimize(loss, global_step=global_step)
        with supervisor.managed_session(target) as session, shards.open(session) as batches:
            for batch in batches:
                session.run(train_op, {x: images[batch.examples], y: labels[batch.examples], **batch.feed})

    A worker leases a block of batches at a time. That a batch is done is a part of the training step itself: it is
    written in the same atomic update as the global step, on its ps. So the table of leases, which is a variable there,
    is saved with every checkpoint, and goes back with the model when that is restored. A lease comes back when its
    worker leaves the block of ``open``, and, with the batches that it had not trained, when the worker has given no
    sign of life for ``lease_secs``: the chief sees to that. ``docs/guarantees.md`` says what is trained once.

    Args:
        num_examples: in the data set.
        batch_size: examples in one batch. One that reaches the end of an epoch is completed from the next, the very
            last one too: all have one size, and a run that goes on with more epochs leaves nothing out.
        epochs: how often the data set is gone through; None, or what is as much, for ever: 2^30 blocks.
        shuffle: every epoch has an order of its own; it takes 8 bytes of memory for each example. False: in order.
        seed: of the orders.
        block_batches: batches in a lease, 15 at most. An epoch should have ten blocks for each worker.
        slots: how many blocks the workers may have between them and the slowest of them: more than there are workers.
        lease_secs: how long a worker may be silent before its lease goes to others.
        global_step: the table lies beside it; the graph's by default.
        name: the same in all workers.

    Raises:
        InvalidArgumentError: a number is out of its range.
    """

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        *,
        epochs: float | None = 1.0,
        shuffle: bool = True,
        seed: int = 0,
        block_batches: int = 10,
        slots: int = 1024,
        lease_secs: float = LEASE_SECS,
        global_step: rt.Variable | None = None,
        name: str = "data_shards",
    ) -> None:
        _check_ranges(name, num_examples, batch_size, block_batches, slots, seed)
        if not lease_secs > 0 or (epochs is not None and not 0 <= epochs < math.inf):
            raise rt.InvalidArgumentError(f"{name}: epochs={epochs} or lease_secs={lease_secs} is out of its range")
        self.name = name
        self.num_examples = num_examples
        self.batch_size = batch_size
        self.lease_secs = lease_secs
        self._block_batches = block_batches
        self._slots = slots
        self._examples = None if epochs is None else round(epochs * num_examples)
        self._orders = _Orders(num_examples, seed if shuffle else None)
        if self.num_blocks > lease_table.MOST_BLOCKS:
            self._examples = None
        self._likeness = num_examples, batch_size, block_batches, seed, int(shuffle)
        self._step = get_or_create_global_step() if global_step is None else global_step
        self._make_operations()
        self._step.graph.add_to_collection(rt.GraphKeys.QUEUE_RUNNERS, LeaseKeeper(self))
        self._step.graph.add_to_collection(ELASTIC, self)

    def _make_operations(self) -> None:
        """Makes the table beside the global step, and the updates that lease and give back."""
        with (
            self._step.graph.as_default(),
            rt.name_scope(None),
            rt.control_dependencies(None),
            rt.device(self._step.device or None),
        ):
            first = lease_table.new_table(self._slots, self._likeness)
            self.table = rt.Variable(first, name=f"{self.name}/table", trainable=False)
            self._marks = rt.placeholder(np.int32, [self._slots], name=f"{self.name}/marks")
            self._asked = rt.placeholder(np.int32, [4], name=f"{self.name}/asked")
            self._given_back = rt.placeholder(np.int32, [_AT_ONCE + 1], name=f"{self.name}/given_back")
            told = [((2,), np.int32)]
            self._lease = rt.update([self.table], _lease, [self._asked], outputs=told, name=f"{self.name}/lease")
            self._release = rt.update([self.table], _release, [self._given_back], name=f"{self.name}/release")

    @property
    def num_batches(self) -> int | None:
        """How many batches there are through all epochs; None when there is no end."""
        return None if self._examples is None else -(-self._examples // self.batch_size)

    @property
    def num_blocks(self) -> int:
        """How many blocks these are."""
        batches = self.num_batches
        return lease_table.MOST_BLOCKS if batches is None else -(-batches // self._block_batches)

    def counted(self, optimizer: AnyOptimizer) -> WrappedOptimizer:
        """The same optimizer, whose training operation says that a batch is done; feed it ``Batch.feed``.

        Args:
            optimizer: what applies gradients; ``SyncReplicas`` and its like take the result.

        Raises:
            InvalidArgumentError: The optimizer is ``SyncReplicas``, which drops stale gradients: they would count.
        """
        inner = optimizer
        while isinstance(inner, WrappedOptimizer):
            if inner.drops_gradients:
                kind = type(inner).__name__
                raise rt.InvalidArgumentError(
                    f"{self.name}: {kind} may drop a gradient whose batch would count as trained: make it "
                    f"{kind}(shards.counted(optimizer), ...)"
                )
            inner = inner.optimizer
        return _Counted(optimizer, self)

    def open(self, session: rt.Session, coord: Coordinator | None = None) -> Batches:
        """This worker's batches, as long as there are any; what it has leased is given back at the end of the block.

        Args:
            session: of the training loop; a managed or monitored session may recover meanwhile.
            coord: its stop ends the batches; that of the session by default.

        Raises:
            InvalidArgumentError: the run deals out another data set, or with other numbers; or the session prefetches.
        """
        return Batches(self, session, coord)

    # -- what the table is asked -----------------------------------------------------------------------------------

    def lease(self, session: rt.Session, owner: int) -> tuple[int, list[int]]:
        """Leases a block: its number, WAIT or END; and the numbers of its batches that are still to be trained."""
        whole = (1 << self._block_batches) - 1
        batches = self.num_batches
        rest = 0 if batches is None else batches % self._block_batches
        asked = np.array([owner, self.num_blocks, whole, (1 << rest) - 1 if rest else whole], np.int32)
        block, marks = (int(number) for number in session.run(self._lease.outputs[0], {self._asked: asked}))
        if block < 0:
            return block, []
        numbers = (block * self._block_batches + i for i in range(self._block_batches) if not marks >> i & 1)
        return block, [number for number in numbers if batches is None or number < batches]

    def release(self, session: rt.Session, owners: Sequence[int], leases: int = _LEASES) -> None:
        """Gives back what some have leased, by the lease of that number at the latest."""
        for start in range(0, len(owners), _AT_ONCE):
            some = list(owners[start : start + _AT_ONCE])
            asked = np.array([leases, *some, *[lease_table.FREE] * (_AT_ONCE - len(some))], np.int32)
            session.run(self._release, {self._given_back: asked})

    def read(self, session: rt.Session) -> Array:
        """The table as it is."""
        found: Array = session.run(self.table)
        return found

    def check(self, session: rt.Session) -> None:
        """Raises InvalidArgumentError when the run deals out another data set, or in another way; says which."""
        there = lease_table.likeness_of(self.read(session))
        wrong = [
            f"{name}={was} (here {own})"
            for name, was, own in zip(_SAID, there, self._likeness, strict=True)
            if was != own & 0x7FFFFFFF
        ]
        if wrong:
            raise rt.InvalidArgumentError(
                f"{self.name}: this run deals out its data with {', '.join(wrong)}: use the same, or begin another run"
            )

    def batch(self, number: int) -> Batch:
        """One batch, from its number."""
        start = number * self.batch_size
        examples = self._orders.examples(start, start + self.batch_size)
        marks = lease_table.mark(self._slots, number, self._block_batches)
        return Batch(number, start / self.num_examples, examples, {self._marks: marks})

    def count(self, after: Sequence[rt.Operation]) -> rt.Operation:
        """The update of the table that says, beside ``after``, that a batch is done."""
        with self._step.graph.as_default(), rt.name_scope(None), rt.control_dependencies(after):
            return rt.update([self.table], _mark, [self._marks], name=f"{self.name}/mark")


def _check_ranges(name: str, *numbers: int) -> None:
    """Raises InvalidArgumentError for a number that is out of its range.

    Args:
        name: Name of the data set, for the message.
        *numbers: The numbers, in the order of ``_RANGES``.
    """
    for number, (argument, (low, high)) in zip(numbers, _RANGES.items(), strict=True):
        if not low <= number <= high:
            raise rt.InvalidArgumentError(f"{name}: {argument}={number} is not from {low} to {high}")


def _lease(table: Any, asked: Any) -> Any:
    after, told = lease_table.leased(table, asked[0], asked[1], asked[2], asked[3])
    return [after], [told]


def _release(table: Any, asked: Any) -> Any:
    return [lease_table.released(table, asked[1:], asked[0])], []


def _mark(table: Any, marks: Any) -> Any:
    return [lease_table.marked(table, marks)], []


class _Counted(WrappedOptimizer):
    """An optimizer whose training operation also says which batch it has trained."""

    def __init__(self, optimizer: AnyOptimizer, shards: DataShards) -> None:
        super().__init__(optimizer, optimizer.name)
        self._shards = shards

    def apply_gradients(
        self,
        grads_and_vars: Sequence[GradientAndVariable],
        global_step: rt.Variable | None = None,
        name: str | None = None,
    ) -> rt.Operation:
        """One operation that applies gradients and says which batch they are of."""
        train = self.optimizer.apply_gradients(grads_and_vars, global_step, name)
        updates = updates_of(train)
        beside = [op for op in updates if op.device == self._shards.table.device]
        if not beside:
            where = self._shards.table.device
            raise rt.InvalidArgumentError(
                f"{self._shards.name}: this optimizer updates nothing on {where!r}, where the table of leases is: give "
                "apply_gradients the global step"
            )
        return rt.group(*updates, self._shards.count(beside), name=f"{self.name}/counted")


class Batches:
    """A worker's batches; see ``DataShards.open``."""

    def __init__(self, shards: DataShards, session: rt.Session, coord: Coordinator | None) -> None:
        self._shards = shards
        # What the library asks of a session is no step of the user's: no hook is called, and it may come after a stop.
        self._session = session.managed if isinstance(session, MonitoredSession) else session
        self._coord = coord or getattr(session, "coord", None) or Coordinator()
        self._owner = lease_table.FREE
        self._left: deque[int] = deque()
        self._id = 0
        self._waiting = False

    def __enter__(self) -> Batches:
        """Sees that the run deals out the same data."""
        if self._session.config.prefetch:
            raise rt.InvalidArgumentError(
                f"{self._shards.name}: with prefetch the gradients of a batch are still under way when the next lease "
                "is asked for: leave SessionConfig.prefetch out"
            )
        self._owner = owner_of(self._session.task)
        self._shards.check(self._session)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gives back what is leased; where that fails, it comes back when the worker has been silent for a while."""
        if error is not None and isinstance(error, Exception) and not isinstance(error, rt.OutOfRangeError):
            return  # most likely there is nobody who could take it back
        try:
            self._shards.release(self._session, [self._owner])
        except (rt.OpError, RuntimeError) as failure:  # the session is closed, say
            logging.info("%s: the lease of this worker is not given back: %s", self._shards.name, failure)

    def __iter__(self) -> Iterator[Batch]:
        """The batches."""
        return self

    def __next__(self) -> Batch:
        """The next batch; waits while others have all that are left.

        Raises:
            StopIteration: all batches of all epochs are done, or a stop was requested.
        """
        if self._coord.should_stop():
            raise StopIteration
        session = self._session.id
        if session != self._id:  # the table may have gone back, and the lease with it
            self._id = session
            self._left.clear()
        while not self._left:
            block, numbers = self._shards.lease(self._session, self._owner)
            if block == lease_table.END:
                raise StopIteration
            self._left.extend(numbers)
            if block == lease_table.WAIT and self._rest():
                raise StopIteration
        self._waiting = False
        return self._shards.batch(self._left.popleft())

    def _rest(self) -> bool:
        """Waits a moment, while nobody waits for this worker's gradients; gives whether a stop was requested."""
        target = self._session.target
        if not self._waiting and target:
            logging.info("%s: other workers have the last batches; waiting whether some come back", self._shards.name)
            try:
                RunRecords(target).rest(self._session.id)
                self._waiting = True
            except LOST_CONTACT as error:  # the next step recovers
                logging.info("%s: %s", self._shards.name, error)
        return self._coord.wait_for_stop(_POLL_SECS)


def owner_of(task: str) -> int:
    """The number by which a worker has leases: 0 of a chief in a job of its own, else one more than the task's."""
    job, index = task.removeprefix("/job:").split("/task:")
    return 0 if job in ("chief", "master") else int(index) + 1


class LeaseKeeper:
    """Takes back the leases of workers that are gone: a thread of the chief, started as a queue runner.

    Args:
        shards: whose leases.
    """

    def __init__(self, shards: DataShards) -> None:
        self._shards = shards
        self.name = f"{shards.name}/leases"
        self._unknown: dict[int, float] = {}  # since when no task has been known that has a lease

    def create_threads(
        self, sess: rt.Session, coord: Coordinator | None = None, daemon: bool = False, start: bool = False
    ) -> list[threading.Thread]:
        """Makes the thread, on the chief; none elsewhere, and none where there is no cluster.

        Args:
            sess: the session that it runs in.
            coord: stops it, and gets its errors.
            daemon: whether it may be left behind when the process ends.
            start: whether to start it.
        """
        target, task = sess.target, sess.task
        if not target or not is_chief(sess, owner_of(task) == 0 or task == "/job:worker/task:0"):
            return []
        coord = coord or Coordinator()
        thread = threading.Thread(target=self._keep, args=(sess, target, coord), name=self.name, daemon=daemon)
        coord.register_thread(thread)
        if start:
            thread.start()
        return [thread]

    def _keep(self, sess: rt.Session, target: str, coord: Coordinator) -> None:
        records = RunRecords(target)
        while not coord.wait_for_stop(self._shards.lease_secs / 4):
            try:
                self.take_back(sess, records)
            except (*LOST_CONTACT, rt.CancelledError, rt.DeadlineExceededError, RuntimeError) as error:
                if coord.should_stop():
                    return
                logging.info("%s: %s", self.name, error)  # training recovers
            except Exception as error:
                coord.request_stop(error)
                return

    def take_back(self, sess: rt.Session, records: RunRecords) -> list[int]:
        """Looks once; gives whose leases have been taken back."""
        table = self._shards.read(sess)  # before the records: a worker that comes back meanwhile has a later lease
        owners = lease_table.owners_of(table)
        gone = gone_owners(owners, records.inspect().values(), self._shards.lease_secs, self._unknown, time.monotonic())
        if gone:
            logging.warning("%s: taking back the leases of %d workers that are gone", self._shards.name, len(gone))
            self._shards.release(sess, gone, lease_table.leases_of(table))
        return gone


def gone_owners(
    owners: Collection[int],
    records: Collection[RunRecordView],
    lease_secs: float,
    unknown: dict[int, float],
    now: float,
) -> list[int]:
    """Of those who have leases, the workers that are done or have been silent for too long.

    Args:
        owners: who have leases.
        records: the run records of all tasks.
        lease_secs: how long a worker may be silent; and how long one may be unknown, as after a restart of all ps.
        unknown: since when the unknown ones are; changed.
        now: ``time.monotonic()``.
    """
    joined = {owner_of(task): task for record in records for task in record.joined if "/task:" in task}
    done = {task for record in records for task in record.done}
    gone = []
    for owner in sorted(owners):
        task = joined.get(owner)
        silences = [record.silent[task] for record in records if task in record.silent] if task else []
        if task is None:
            since = unknown.setdefault(owner, now)
        else:
            unknown.pop(owner, None)
            since = now - min(silences, default=0.0)
        if task in done or now - since >= lease_secs:
            gone.append(owner)
    return gone


class _Orders:
    """In which order each epoch deals out its examples; keeps those of the last two."""

    def __init__(self, num_examples: int, seed: int | None) -> None:
        self._num_examples = num_examples
        self._seed = seed
        self._kept: dict[int, Array] = {}

    def examples(self, start: int, end: int) -> Array:
        """The examples at these places of the sequence of all epochs, int64."""
        parts = []
        while start < end:
            epoch, place = divmod(start, self._num_examples)
            count = min(end - start, self._num_examples - place)
            parts.append(self._of(epoch, place, place + count))
            start += count
        return np.concatenate(parts)

    def _of(self, epoch: int, start: int, end: int) -> Array:
        if self._seed is None:
            return np.arange(start, end)
        if epoch not in self._kept:
            if len(self._kept) > 1:
                del self._kept[min(self._kept)]
            self._kept[epoch] = np.random.default_rng((self._seed, epoch)).permutation(self._num_examples)
        return self._kept[epoch][start:end]
