"""DataShards: deals a data set out, block by block, to workers that come and go.

A training program makes a ``DataShards`` beside its optimizer and trains on the ``LeasedBatches`` of its
worker. The table of leases (``lease_table``) is a variable beside the global step, so the table is
saved and restored with the model.
"""

import functools
import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from absl import logging

import runtime as rt
from harness.coordinator import Coordinator, create_threads, underlying
from harness.data import lease_table, times
from harness.optimizers.optimizer import (
    AnyOptimizer,
    GradientAndVariable,
    WrappedOptimizer,
    updates_of,
)
from harness.optimizers.tables import table_of
from harness.training.run.monitored_session import MonitoredSession
from harness.training.start.global_step import get_or_create_global_step
from harness.training.start.managed_session import is_chief
from harness.training.start.session_start import LOST_CONTACT
from harness.training.stop.task_run import ELASTIC
from runtime import concurrency
from runtime.lowlevel import Array, RunRecords, RunRecordView, explains_arguments

_AT_ONCE = 32
"""Number of workers whose leases one update takes back."""
_LEASES = np.iinfo(np.int32).max
"""Number that is above that of every lease."""
_SAID = ("num_examples", "batch_size", "block_batches", "seed")
"""Names of the numbers that tell one data set from another, in the order of the table."""

_RANGES = {
    "num_examples": (1, 2**62),
    "batch_size": (1, 2**31 - 1),
    "block_batches": (1, lease_table.BLOCK),
    "slots": (8, 2**20),
    "seed": (0, 2**62),
}
"""By argument of ``DataShards``: the least and the greatest number that is taken."""


@dataclass(frozen=True, eq=False)
class LeasedBatch:
    """The examples of one training step.

    Attributes:
        number: Number of the batch, from 0, through all epochs.
        epoch: Epochs that were dealt out before the batch: 1.5 in the middle of the second epoch.
        examples: Indices of the examples, int64[batch_size], below ``num_examples``.
        feed: Further feed of the training step, which marks these examples as done in the update of
            the gradients.
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

    A worker leases a block of batches at a time. The training step itself marks a batch as done, in
    the atomic update of the global step on its ps. So the table of leases is saved with every
    checkpoint, and goes back with the model in a restore. A worker gives its lease back at the end
    of the block of ``open``. The chief takes the lease of a worker back that has been silent for
    ``lease_secs``, with the batches that were not trained. ``docs/guarantees.md`` says which
    batches are trained once.

    Args:
        num_examples: Number of examples in the data set.
        batch_size: Number of examples in one batch. A batch at the end of an epoch is completed
            from the next epoch, the very last batch too. So all batches have one size, and a run
            that continues with more epochs leaves no example out.
        epochs: Number of times that each example is dealt out. None, or as many as give 2^30
            blocks, is without end.
        seed: Seed of the orders, one for each epoch. An order takes 8 bytes of memory for each
            example.
        block_batches: Batches in a lease, 15 at most. An epoch should have ten blocks for each
            worker.
        slots: Blocks under way at once, from the oldest that is not done on: more than there are
            workers.
        lease_secs: Silence, in seconds, after which the lease of a worker goes to others.
        global_step: Variable beside which the table lies. Default: the graph's global step.
        name: Name of the data set, the same in all workers.

    Raises:
        InvalidArgumentError: A number is out of its range.
    """

    @explains_arguments
    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        *,
        epochs: float | None = 1.0,
        seed: int = 0,
        block_batches: int = 10,
        slots: int = 1024,
        lease_secs: float = times.LEASE_SECS,
        global_step: rt.Variable | None = None,
        name: str = "data_shards",
    ) -> None:
        numbers = (num_examples, batch_size, block_batches, slots, seed)
        for number, (argument, (low, high)) in zip(numbers, _RANGES.items(), strict=True):
            if not low <= number <= high:
                raise rt.InvalidArgumentError(
                    f"{name}: {argument}={number} is not from {low} to {high}"
                )
        if not lease_secs > 0 or (epochs is not None and not 0 <= epochs < math.inf):
            raise rt.InvalidArgumentError(
                f"{name}: epochs={epochs} or lease_secs={lease_secs} is out of its range"
            )
        self.name = name
        self.num_examples = num_examples
        self.batch_size = batch_size
        self.lease_secs = lease_secs
        self._block_batches = block_batches
        self._slots = slots
        self._examples = None if epochs is None else round(epochs * num_examples)
        self._seed = seed
        # A batch may lie in two epochs.
        self._order = functools.lru_cache(maxsize=2)(self._make_order)
        # More blocks than int32 can count are without end.
        if self.num_blocks > lease_table.MOST_BLOCKS:
            self._examples = None
        # Programs with the same numbers deal out the same batches.
        self._likeness = num_examples, batch_size, block_batches, seed
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
            self._given_back = rt.placeholder(
                np.int32, [_AT_ONCE + 1], name=f"{self.name}/given_back"
            )
            told = [((2,), np.int32)]
            self._lease = rt.update(
                [self.table], _lease, [self._asked], outputs=told, name=f"{self.name}/lease"
            )
            self._release = rt.update(
                [self.table], _release, [self._given_back], name=f"{self.name}/release"
            )

    @property
    def num_batches(self) -> int | None:
        """Number of batches in all epochs; None when there is no end."""
        return None if self._examples is None else -(-self._examples // self.batch_size)

    @property
    def num_blocks(self) -> int:
        """Number of blocks in all epochs."""
        batches = self.num_batches
        return lease_table.MOST_BLOCKS if batches is None else -(-batches // self._block_batches)

    def counted(self, optimizer: AnyOptimizer) -> WrappedOptimizer:
        """Wraps an optimizer: its training operation marks a batch as done.

        Feed the operation ``LeasedBatch.feed``.

        Args:
            optimizer: Optimizer that applies gradients. ``SyncReplicas`` goes around the result.

        Raises:
            InvalidArgumentError: The optimizer is ``SyncReplicas``, which drops stale gradients:
                their batches would count as done.
        """
        inner = optimizer
        while isinstance(inner, WrappedOptimizer):
            if inner.drops_gradients:
                kind = type(inner).__name__
                raise rt.InvalidArgumentError(
                    f"{self.name}: {kind} may drop a gradient whose batch would count as trained: "
                    f"make it {kind}(shards.counted(optimizer), ...)"
                )
            inner = inner.optimizer
        return _CountedOptimizer(optimizer, self)

    def open(self, session: rt.SessionLike, coord: Coordinator | None = None) -> "LeasedBatches":
        """Returns this worker's batches, for a ``with`` block.

        The end of the block gives the lease back.

        Args:
            session: Session of the training loop. A managed or monitored session may recover
                meanwhile.
            coord: Coordinator whose stop ends the batches. Default: that of the session.

        Raises:
            InvalidArgumentError: The run deals out another data set, or with other numbers; or the
                session prefetches.
        """
        return LeasedBatches(self, session, coord)

    # -- questions to the table --------------------------------------------------------------------

    def lease(self, session: rt.SessionLike, owner: int) -> tuple[int, list[int]]:
        """Leases a block for a worker.

        Args:
            session: Session that asks.
            owner: Number of the worker (``owner_of``).

        Returns:
            The number of the block, WAIT or END; and the numbers of its batches that are still to
            be trained.
        """
        whole = (1 << self._block_batches) - 1
        batches = self.num_batches
        # The last block may have fewer batches.
        rest = 0 if batches is None else batches % self._block_batches
        asked = np.array(
            [owner, self.num_blocks, whole, (1 << rest) - 1 if rest else whole], np.int32
        )
        block, marks = (
            int(number) for number in session.run(self._lease.outputs[0], {self._asked: asked})
        )
        if block < 0:
            return block, []
        assert block < self.num_blocks
        numbers = (
            block * self._block_batches + i
            for i in range(self._block_batches)
            if not marks >> i & 1
        )
        left = [number for number in numbers if batches is None or number < batches]
        assert left, "the same block would be leased for ever"
        return block, left

    def release(
        self, session: rt.SessionLike, owners: Sequence[int], leases: int = _LEASES
    ) -> None:
        """Gives the leases of some workers back.

        Args:
            session: Session that asks.
            owners: Numbers of the workers.
            leases: Number of the last lease that is given back. A worker that has come back since
                has a later lease.
        """
        # The update takes a fixed number of owners, so that it is compiled once.
        for start in range(0, len(owners), _AT_ONCE):
            some = list(owners[start : start + _AT_ONCE])
            asked = np.array(
                [leases, *some, *[lease_table.FREE] * (_AT_ONCE - len(some))], np.int32
            )
            session.run(self._release, {self._given_back: asked})

    def read(self, session: rt.SessionLike) -> Array:
        """Returns the table, int32[4, slots]."""
        found: Array = session.run(self.table)
        return found

    def check(self, session: rt.SessionLike) -> None:
        """Raises InvalidArgumentError when the run deals out another data set, or with other numbers."""
        there = lease_table.likeness_of(self.read(session))
        wrong = [
            f"{name}={was} (here {own})"
            for name, was, own in zip(_SAID, there, self._likeness, strict=True)
            if was != own & 0x7FFFFFFF
        ]
        if wrong:
            raise rt.InvalidArgumentError(
                f"{self.name}: this run deals out its data with {', '.join(wrong)}: use the same, "
                "or begin another run"
            )

    def batch(self, number: int) -> LeasedBatch:
        """Returns the batch with a number."""
        start = number * self.batch_size
        place, end = start, start + self.batch_size
        parts = []
        # A batch at the end of an epoch continues in the next epoch.
        while place < end:
            epoch, first = divmod(place, self.num_examples)
            parts.append(self._order(epoch)[first : first + end - place])
            place += len(parts[-1])
        assert place == end, "all batches have one size"
        marks = lease_table.mark(self._slots, number, self._block_batches)
        return LeasedBatch(
            number, start / self.num_examples, np.concatenate(parts), {self._marks: marks}
        )

    def _make_order(self, epoch: int) -> Array:
        return np.random.default_rng((self._seed, epoch)).permutation(self.num_examples)

    def count(self, after: Sequence[rt.Operation]) -> rt.Operation:
        """Makes the update of the table that marks a batch as done.

        Args:
            after: Updates beside which this one runs, on the same ps.
        """
        with self._step.graph.as_default(), rt.name_scope(None), rt.control_dependencies(after):
            return rt.update([self.table], _mark, [self._marks], name=f"{self.name}/mark")


def _lease(table: Any, asked: Any) -> Any:
    after, told = lease_table.leased(table, asked[0], asked[1], asked[2], asked[3])
    return [after], [told]


def _release(table: Any, asked: Any) -> Any:
    return [lease_table.released(table, asked[1:], asked[0])], []


def _mark(table: Any, marks: Any) -> Any:
    return [lease_table.marked(table, marks)], []


class _CountedOptimizer(WrappedOptimizer):
    """An optimizer whose training operation also marks its batch as done."""

    def __init__(self, optimizer: AnyOptimizer, shards: DataShards) -> None:
        super().__init__(optimizer, optimizer.name)
        self._shards = shards

    def apply_gradients(
        self,
        grads_and_vars: Sequence[GradientAndVariable],
        global_step: rt.Variable | None = None,
        name: str | None = None,
    ) -> rt.Operation:
        """Makes one operation that applies gradients and marks their batch as done.

        Args:
            grads_and_vars: Gradients with their variables.
            global_step: Variable that counts the steps, beside the table of leases.
            name: Name of the operation.

        Raises:
            InvalidArgumentError: The optimizer updates nothing on the ps of the table, so no update
                could be shared.
        """
        train = self.optimizer.apply_gradients(grads_and_vars, global_step, name)
        updates = updates_of(train)
        where = self._shards.table.device
        # In one atomic update with the step: a batch is done exactly when its gradient counts.
        # Rows are updated by a kernel, but in the same message.
        beside = [op for op in updates if op.device == where and not table_of(op)]
        if not beside:
            raise rt.InvalidArgumentError(
                f"{self._shards.name}: this optimizer updates nothing on {where!r}, where the "
                "table of leases is: give apply_gradients the global step"
            )
        return rt.group(*updates, self._shards.count(beside), name=f"{self.name}/counted")


class LeasedBatches:
    """The batches of a worker; see ``DataShards.open``."""

    def __init__(
        self, shards: DataShards, session: rt.SessionLike, coord: Coordinator | None
    ) -> None:
        self._shards = shards
        # The questions here are no steps of the user's. So they bypass the hooks, and may come
        # after a stop.
        self._session = session.managed if isinstance(session, MonitoredSession) else session
        self._coord = coord or getattr(session, "coord", None) or Coordinator()
        self._owner = lease_table.FREE
        self._left: deque[int] = deque()
        self._id = 0
        self._waiting = False

    def __enter__(self) -> "LeasedBatches":
        """Checks that the run deals out the same data."""
        if underlying(self._session).config.prefetch:
            raise rt.InvalidArgumentError(
                f"{self._shards.name}: with prefetch the gradients of a batch are still under way "
                "when the next lease is asked for: leave SessionConfig.prefetch out"
            )
        self._owner = owner_of(underlying(self._session).task)
        self._shards.check(self._session)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Gives the lease back.

        Where this fails, the chief takes the lease back after ``lease_secs``.
        """
        owner, self._owner = self._owner, lease_table.FREE
        # After an error the session is most likely lost, and a question to it would wait in vain.
        if (
            error is not None
            and isinstance(error, Exception)
            and not isinstance(error, rt.OutOfRangeError)
        ):
            return
        try:
            self._shards.release(self._session, [owner])
        except (rt.OpError, RuntimeError) as failure:
            # The program may have closed the session before.
            logging.info(
                "%s: the lease of this worker is not given back: %s", self._shards.name, failure
            )

    def __iter__(self) -> Iterator[LeasedBatch]:
        """Returns the batches themselves."""
        return self

    def __next__(self) -> LeasedBatch:
        """Returns the next batch; waits while other workers have all that are left.

        Raises:
            StopIteration: All batches of all epochs are done, or a stop was requested.
            RuntimeError: The ``with`` block has not begun, or has ended.
        """
        # Without an owner no worker would have the lease, and all workers would train its batches.
        if self._owner == lease_table.FREE:
            raise RuntimeError(
                f"{self._shards.name}: read the batches in the block of `with shards.open(session) as batches`"
            )
        if self._coord.should_stop():
            raise StopIteration
        session = underlying(self._session).id
        # A new session may come with a restored table, which does not know the lease.
        if session != self._id:
            self._id = session
            self._left.clear()
        while not self._left:
            block, numbers = self._shards.lease(self._session, self._owner)
            if block == lease_table.END:
                raise StopIteration
            self._left.extend(numbers)
            if block == lease_table.WAIT and self._await_others():
                raise StopIteration
        self._waiting = False
        return self._shards.batch(self._left.popleft())

    def _await_others(self) -> bool:
        """Waits a moment for a batch of another worker; returns True if a stop was requested.

        Synchronous workers are informed first that no gradient of this worker will come.
        """
        target = underlying(self._session).target
        if not self._waiting and target:
            logging.info(
                "%s: other workers have the last batches; waiting whether some come back",
                self._shards.name,
            )
            try:
                RunRecords(target).rest(underlying(self._session).id)
                self._waiting = True
            except LOST_CONTACT as error:
                # The next question for a lease is a step, and recovers.
                logging.info("%s: %s", self._shards.name, error)
        return self._coord.wait_for_stop(times.POLL_SECS)


def owner_of(task: str) -> int:
    """Returns the number of a worker in the table: 0 for a job chief or master, else the task's number plus one."""
    job, index = task.removeprefix("/job:").split("/task:")
    return 0 if job in ("chief", "master") else int(index) + 1


class LeaseKeeper:
    """Takes back the leases of workers that are gone: a thread of the chief, started as a queue runner.

    Args:
        shards: Data set of the leases.
    """

    def __init__(self, shards: DataShards) -> None:
        self._shards = shards
        self.name = f"{shards.name}/leases"
        # By number of a lease's owner: the time since which no task with this number has been
        # known.
        self._unknown: dict[int, float] = {}

    def create_threads(
        self,
        sess: rt.SessionLike,
        coord: Coordinator | None = None,
        daemon: bool = False,
        start: bool = False,
    ) -> list[concurrency.Thread]:
        """Makes the thread, on the chief; none elsewhere, and none where there is no cluster.

        Args:
            sess: Session in which the thread runs.
            coord: Coordinator that stops the thread and receives its errors.
            daemon: True if the end of the process does not wait for the thread.
            start: True to start the thread.
        """
        target, task = underlying(sess).target, underlying(sess).task
        if not target or not is_chief(sess, owner_of(task) == 0 or task == "/job:worker/task:0"):
            return []
        coord = coord or Coordinator()
        keep = functools.partial(self._keep_leases, sess, target, coord)
        return create_threads({self.name: keep}, self.name, coord, daemon=daemon, start=start)

    def _keep_leases(self, sess: rt.SessionLike, target: str, coord: Coordinator) -> None:
        records = RunRecords(target)
        while not coord.wait_for_stop(self._shards.lease_secs / 4):
            try:
                self.take_back(sess, records)
            except (
                *LOST_CONTACT,
                rt.CancelledError,
                rt.DeadlineExceededError,
                RuntimeError,
            ) as error:
                if coord.should_stop():
                    return
                # The next training step meets the loss, and recovers.
                logging.info("%s: %s", self.name, error)
            except Exception as error:
                coord.request_stop(error)
                return

    def take_back(self, sess: rt.SessionLike, records: RunRecords) -> list[int]:
        """Takes back, once, the leases of absent workers; returns their numbers.

        Args:
            sess: Session that asks.
            records: Run records that know the workers.
        """
        # The table is read before the records: a worker that comes back meanwhile has a later
        # lease.
        table = self._shards.read(sess)
        owners = lease_table.owners_of(table)
        gone = gone_owners(
            owners,
            records.inspect().values(),
            self._shards.lease_secs,
            self._unknown,
            concurrency.monotonic(),
        )
        if gone:
            logging.warning(
                "%s: taking back the leases of %d workers that are gone",
                self._shards.name,
                len(gone),
            )
            self._shards.release(sess, gone, lease_table.leases_of(table))
        return gone


def gone_owners(
    owners: Collection[int],
    records: Collection[RunRecordView],
    lease_secs: float,
    unknown: dict[int, float],
    now: float,
) -> list[int]:
    """Returns the workers with leases that are done or have been silent for too long.

    Args:
        owners: Numbers of the workers with leases.
        records: Run records of all tasks.
        lease_secs: Seconds that a worker may be silent, or unknown, as after a restart of all ps.
        unknown: By number of an unknown worker: the time since which it is unknown. The function
            updates this.
        now: The time on ``time.monotonic()``.
    """
    joined = {
        owner_of(task): task for record in records for task in record.joined if "/task:" in task
    }
    done = {task for record in records for task in record.done}
    gone = []
    assert lease_table.FREE not in owners
    for owner in sorted(owners):
        task = joined.get(owner)
        silences = (
            [record.silent[task] for record in records if task in record.silent] if task else []
        )
        if task is None:
            since = unknown.setdefault(owner, now)
        else:
            unknown.pop(owner, None)
            # The latest sign of life on any ps counts.
            since = now - min(silences, default=0.0)
        if task in done or now - since >= lease_secs:
            gone.append(owner)
    return gone
