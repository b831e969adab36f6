"""The primary of a backup: a task counts its updates, sends the changes, and bounds the lag of the backup.

    update --> counted --> reply, unless more than ``lag`` updates would not be in the backup then
                  |--> a thread takes an image (references, microseconds), sends the changes, notes their arrival

Wanted: an update that a client sends again is applied exactly once, also if the task has died in
between, and a step need not wait for another machine.

Two simpler ways do not work. If the task forwards each update before the reply, the holder has to
run the update too: the holder needs the programs and the memory of two tasks, and each step pays a
message. If the task sends the variables alone, a client whose reply was lost repeats an update that
the image has, and the update is applied twice.

The solution. A client numbers the calls of a lane, and a task answers a repeated call with the
answer before (``runtime/wire/reply_cache.py``). An image is taken between updates, never during an
update, and has the last answer of each lane beside the variables. So an image has an update
together with the answer, or has neither. With ``lag=0`` the reply to an update waits until the
backup has the update. With a greater lag the reply waits only if more updates than that would be
missing.

The limits of the solution: the last ``lag`` answered updates are lost with the task. If the task
and the holder die together, training continues from the checkpoint. The answer of a lane is kept
for ``times.LANE_MEMORY_SECS``, and an update that is repeated later may be applied twice.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from absl import logging

from runtime import concurrency
from runtime.backup import times
from runtime.backup.holder import (
    CHUNK_BYTES,
    REFUSED_PROCESS,
    BackupEntry,
    Header,
    Json,
    chunks,
    packed,
)
from runtime.errors import AbortedError, OpError, UnavailableError
from runtime.tensor_spec import Array
from runtime.wire.connection import Reply, current_call

DEFAULT_LAG = 100
"""Updates that may be lost by default."""
_TRIES = 3
_SHARE = 9.0
"""The pause between two sendings without a waiting caller, as a multiple of the last sending's time."""

Send = Callable[[Header, Sequence[Array]], tuple[Header, Sequence[Array]]]
"""``(header, arrays) -> header, arrays``: sends a message and returns the answer."""
LaneKey = tuple[int, int]
"""(client, lane)."""


@dataclass(frozen=True)
class CapturedEntry:
    """One entry of a task as of an instant, not yet encoded.

    Attributes:
        token: an object, or an equal string or number, that stays while the entry is unchanged.
        load: makes the entry.
    """

    token: object
    load: Callable[[], BackupEntry]


@dataclass(frozen=True)
class StateCapture:
    """A task as of one instant, by reference.

    Attributes:
        unusable_because: the reason against a backup now; empty without one.
        parts: the entries by name.
        release: releases the references.
    """

    unusable_because: str
    parts: Mapping[str, CapturedEntry]
    release: Callable[[], None]


@dataclass(frozen=True)
class AnsweredUpdate:
    """The last update on a lane.

    Attributes:
        seq: number of the update on the lane.
        reply: the answer.
        at: ``time.monotonic()`` of the answer.
    """

    seq: int
    reply: Reply
    at: float


class ImageSender:
    """The sender of a task's images to the holder of its backup. One thread uses the sender.

    Args:
        task: the task.
        process_id: random number of this process.
        about: facts for a later process of the task, which reads them before the entries.
        send: sends a message to the holder and returns the answer.
        chunk_bytes: bytes of arrays in one message.

    Attributes:
        moved_at: ``time.monotonic()`` at which the holder answered the last message.
        images: images sent so far.
        nbytes: bytes of arrays in these images.
        secs: seconds that the sending of these images took.
        last_secs: seconds that the sending of the last image took.
    """

    def __init__(
        self, task: str, process_id: int, about: Mapping[str, Json], send: Send, chunk_bytes: int
    ) -> None:
        self.moved_at = 0.0
        self.images = self.nbytes = 0
        self.secs = self.last_secs = 0.0
        self._from = {"of": task, "process_id": process_id}
        self._about = about
        self._send = send
        self._chunk_bytes = chunk_bytes
        self._introduced = False
        # The image at the holder: its version, its tokens, and the reason why no task can continue
        # from the image.
        self._kept: tuple[int, Mapping[str, object], str] | None = None

    def forget(self) -> None:
        """Forgets the image at the holder, so that the next image is sent whole."""
        self._kept = None

    def push(self, version: int, capture: StateCapture) -> str:
        """Sends the entries that have changed since the image at the holder, and releases the capture.

        Args:
            version: version of the capture.
            capture: references to the task.

        Returns:
            The reason for which the holder has refused the image, a ``REFUSED_...``; empty if the
            holder has the image.
        """
        base, known, unusable_because = self._kept or (None, {}, "")
        assert base is None or base <= version, "the holder has a later image"
        # The references are released as soon as the changed entries are encoded: until then updates
        # copy arrays.
        try:
            tokens = {name: part.token for name, part in capture.parts.items()}
            changed = {
                name: part.load()
                for name, part in capture.parts.items()
                if name not in known or not _same(known[name], part.token)
            }
        finally:
            capture.release()
        # The holder knows already that there is no image.
        if capture.unusable_because and capture.unusable_because == unusable_because:
            return ""
        began = concurrency.monotonic()
        # The holder has no image, or another image than the one that the changes start from.
        if refused := self._send_messages(version, capture, changed, base):
            self.forget()
            return refused
        # A later hello would look like the hello of a new process.
        self._introduced = True
        self._kept = version, tokens, capture.unusable_because
        self.images += 1
        self.nbytes += sum(entry.nbytes for entry in changed.values())
        self.last_secs = concurrency.monotonic() - began
        self.secs += self.last_secs
        return ""

    def _send_messages(
        self,
        version: int,
        capture: StateCapture,
        changed: Mapping[str, BackupEntry],
        base: int | None,
    ) -> str:
        messages = chunks(changed, self._chunk_bytes)
        for index, chunk in enumerate(messages):
            table, arrays = packed(chunk)
            header: Header = {"kind": "push", **self._from, "hello": not self._introduced}
            header |= {"version": version, "base": base, "index": index, "put": table}
            # The names of all entries come last, and complete the image at the holder.
            if index == len(messages) - 1:
                header |= {
                    "keep": list(capture.parts),
                    "about": dict(self._about),
                    "unusable_because": capture.unusable_because,
                }
            answer, _ = self._send(header, arrays)
            self.moved_at = concurrency.monotonic()
            if refused := answer.get("refused", ""):
                return str(refused)
        return ""


class PrimaryState(enum.Enum):
    """The states of a primary.

    Attributes:
        OPEN: the task runs.
        CLOSED: the task stops. Updates that are not in the backup are answered by the process that
            continues.
        REPLACED: another process has taken the place of the task.
    """

    OPEN = enum.auto()
    CLOSED = enum.auto()
    REPLACED = enum.auto()


class Primary:
    """The sending side of a backup: counts updates, sends images, and bounds the lag.

    ``start`` starts the thread.

    Args:
        task: the task.
        holder: name of the task that holds the backup.
        lag: most answered updates that are not in the backup.
        process_id: random number of this process.
        about: facts for a later process of the task, which reads them before the entries.
        capture: takes references to the state of the task; called between updates.
        send: sends a message to the holder and returns the answer.
        fenced: called when another process has taken the place of this process.
        chunk_bytes: bytes of arrays in one message.
    """

    def __init__(
        self,
        task: str,
        holder: str,
        lag: int,
        process_id: int,
        about: Mapping[str, Json],
        capture: Callable[[Mapping[LaneKey, AnsweredUpdate]], StateCapture],
        send: Send,
        fenced: Callable[[], None],
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.task = task
        self.holder = holder
        self.lag = lag
        self._capture = capture
        self._fenced = fenced
        self._sender = ImageSender(task, process_id, about, send, chunk_bytes)
        self._lock = concurrency.Lock()
        self._resumed = concurrency.Condition(self._lock)
        self._work = concurrency.Condition(self._lock)
        self._arrived = concurrency.Condition(self._lock)
        self._paused = False
        self._running = 0
        self._version = 0
        self._taken = -1
        self._replicated = -1
        # Number of callers that wait for all updates so far.
        self._urgent = 0
        self._lost = ""
        self._unusable_because = ""
        self._state = PrimaryState.OPEN
        self._answered: dict[LaneKey, AnsweredUpdate] = {}
        self._arrived_at = 0.0
        self._most_lag = 0
        self._waited_secs = 0.0
        self._threads = concurrency.ThreadGroup(f"backup of {task} at {holder}")
        self._thread = self._threads.create(self._run, name=f"backup of {task}")

    def start(self) -> None:
        """Starts sending."""
        self._thread.start()

    def close(self) -> None:
        """Stops the thread, which sends the last updates before if the sending takes at most a second."""
        with self._lock:
            self._urgent += 1
            self._work.notify()
            if self._thread.is_alive():
                self._arrived.wait_for(lambda: self._has(self._version), times.CLOSE_SECS)
            if self._is_open:
                self._state = PrimaryState.CLOSED
            for condition in (self._work, self._arrived, self._resumed):
                condition.notify_all()
        self._threads.close(times.CLOSE_SECS)

    @property
    def _is_open(self) -> bool:
        return self._state is PrimaryState.OPEN

    # -- what the task does -----------------------------------------------------------------------

    def carry_out(self, run: Callable[[], Reply], client: int, *, gated: bool) -> Reply:
        """Runs a call that changes the task, and waits until the reply may be sent.

        Args:
            run: runs the call, and calls ``count`` for an update.
            client: the session of the caller.
            gated: True for an update of variables, which waits for no other worker. Every other
                call is an order. The reply to an order waits until the backup has the whole order,
                whatever the lag.

        Raises:
            AbortedError, UnavailableError: as ``_wait_for``.
        """
        if not gated:
            reply = run()
            self.count()
            self.settle()
            return reply
        # An image must not have half of an update, so updates wait while an image is taken.
        with self._lock:
            while self._paused:
                self._resumed.wait(times.WAIT_SECS)
            self._running += 1
        answered = None
        try:
            reply = run()
            # The answer goes into the same image as the update: a repeated call finds both or none.
            lane, seq = current_call()
            answered = AnsweredUpdate(seq, reply, concurrency.monotonic())
        finally:
            with self._lock:
                self._running -= 1
                if answered is not None:
                    self._answered[client, lane] = answered
                if self._paused and not self._running:
                    self._work.notify()
                # A failed call may have changed something before its error, so its reply waits too.
                self._wait_for(self._version - self.lag)
        return reply

    def _has(self, version: int) -> bool:
        """Returns True if the backup has a version, or no wait helps: the holder is lost, or the task stops."""
        return self._replicated >= version or bool(self._lost) or not self._is_open

    def _wait_for(self, version: int, patience_secs: float | None = None) -> None:
        """Waits, holding the lock, until the backup has a version; does not wait for a lost holder.

        All waits of updates and orders happen here.

        Args:
            version: the version.
            patience_secs: time without an answer of the holder after which the wait has failed;
                None for no limit.

        Raises:
            AbortedError: Another process has taken the place of this process.
            UnavailableError: The version was not in the backup in time, or before the task stopped.
        """
        assert concurrency.holds(self._arrived)
        if not self._has(version):
            began = concurrency.monotonic()
            while not self._arrived.wait_for(lambda: self._has(version), patience_secs):
                # A large image takes long. Only a holder that does not answer is given up.
                if (
                    patience_secs is not None
                    and concurrency.monotonic() - self._sender.moved_at >= patience_secs
                ):
                    what = f"its backup at {self.holder} has not got this for {patience_secs:g} s"
                    raise UnavailableError(what, task=self.task)
            self._waited_secs += concurrency.monotonic() - began
        if self._state is PrimaryState.REPLACED:
            raise AbortedError("another process has taken the place of this one", task=self.task)
        if self._state is PrimaryState.CLOSED and not self._lost and self._replicated < version:
            # The caller repeats the call, and the process that goes on from the backup answers or
            # runs it.
            raise UnavailableError(
                f"its backup at {self.holder} had not got this when it stopped", task=self.task
            )

    def count(self) -> None:
        """Notes an update, or another change."""
        with self._lock:
            self._version += 1
            pending = self._version - self._taken
            self._most_lag = max(self._most_lag, self._lag_now)
            # The thread sleeps without work, and hurries when half of the lag is used up.
            if pending == 1 or pending == self._soon():
                self._work.notify()

    @property
    def _lag_now(self) -> int:
        """Updates that are not in the backup."""
        return self._version - max(self._replicated, 0)

    def _soon(self) -> int:
        """Returns the number of updates outside an image that makes the next image urgent."""
        return max(1, self.lag // 2)

    def settle(self, patience_secs: float = times.SETTLE_SECS) -> None:
        """Waits until the backup has all updates so far; arguments and errors as of ``_wait_for``."""
        with self._lock:
            self._urgent += 1
            self._work.notify()
            try:
                self._wait_for(self._version, patience_secs)
            finally:
                self._urgent -= 1

    def forget(self, client: int) -> None:
        """Forgets the answers to a client that has said goodbye and repeats no call."""
        with self._lock:
            for key in [key for key in self._answered if key[0] == client]:
                del self._answered[key]

    def inherit(self, answered: Mapping[LaneKey, AnsweredUpdate]) -> None:
        """Takes over the answers of an earlier process of the task."""
        with self._lock:
            assert not self._version, "this process has updates of its own"
            self._answered.update(answered)

    @property
    def problem(self) -> str:
        """The reason against a continuation from the backup now; empty if the task could continue."""
        with self._lock:
            if self._lost:
                return f"no backup at {self.holder}: {self._lost}"
            return self._unusable_because

    def values(self) -> dict[str, float]:
        """Returns the figures of the backup in updates, bytes and seconds; the greatest lag since the last call."""
        with self._lock:
            lag, sender = self._lag_now, self._sender
            most, self._most_lag = max(self._most_lag, lag), lag
            return {
                "backup_lag_steps": lag,
                "backup_lag_steps_max": most,
                "backup_usable": float(
                    not self._lost and not self._unusable_because and self._replicated >= 0
                ),
                "backup_sendings_total": sender.images,
                "backup_bytes_total": sender.nbytes,
                "backup_seconds_total": sender.secs,
                "backup_wait_seconds_total": self._waited_secs,
            }

    def validate(self) -> None:
        """Asserts the invariants; for tests."""
        with self._lock:
            assert -1 <= self._replicated <= self._taken <= self._version
            assert self._running >= 0 and self._urgent >= 0
            assert self._most_lag >= self._lag_now, "a lag was not noted"
            assert not self._paused or self._thread.is_alive(), "updates wait for no thread"

    # -- the thread that sends --------------------------------------------------------------------

    def _run(self) -> None:
        backoff = times.FIRST_BACKOFF_SECS
        while self._wait_for_work():
            try:
                self._replicate()
                backoff = times.FIRST_BACKOFF_SECS
                continue
            except OpError as error:
                self._note_lost(str(error))
            except Exception as error:
                # A computation may have failed, for example. The caller of the computation gets the
                # error.
                logging.exception("%s: its backup could not be brought up to date", self.task)
                self._note_lost(str(error))
            self._sender.forget()
            with self._lock:
                self._work.wait_for(lambda: not self._is_open, backoff)
            # A holder that is started again is soon used again, and a dead holder costs no core.
            backoff = min(2 * backoff, times.LAST_BACKOFF_SECS)

    def _wait_for_work(self) -> bool:
        with self._lock:
            while self._is_open:
                pending = self._version - self._replicated
                if pending and (self._urgent or pending >= self._soon() or self._lost):
                    return True
                pause = (
                    min(
                        times.MOST_PAUSE_SECS,
                        max(times.LEAST_PAUSE_SECS, _SHARE * self._sender.last_secs),
                    )
                    if pending
                    else times.CHECK_SECS
                )
                left = self._arrived_at + pause - concurrency.monotonic()
                if left <= 0:
                    return True
                self._work.wait(left)
            return False

    def _replicate(self) -> None:
        """Brings the backup up to date, with a whole image if the holder has lost the last image."""
        # A holder that lost its image refuses the changes, and the second try is a whole image.
        for _ in range(_TRIES):
            taken = self._take()
            if taken is None:
                return
            refused = self._sender.push(*taken)
            if not refused:
                self._note_arrived(taken[0], taken[1].unusable_because)
                return
            if refused == REFUSED_PROCESS:
                self._leave()
                return

    def _leave(self) -> None:
        """Leaves the place of the task to the process that has taken the place."""
        logging.error("%s: another process has taken its place: this one leaves", self.task)
        self._fenced()
        with self._lock:
            self._state = PrimaryState.REPLACED
            self._arrived.notify_all()

    def _take(self) -> tuple[int, StateCapture] | None:
        """Returns references to the task between two updates; None if an update under way takes long."""
        with self._lock:
            self._paused = True
            try:
                # Updates that are under way end, and new updates wait meanwhile.
                drained = self._work.wait_for(
                    lambda: not self._running or not self._is_open, times.DRAIN_SECS
                )
                if drained and self._is_open:
                    # No update is under way, so the version and the references below belong
                    # together.
                    self._taken = self._version
                    # The answer of a lane that was idle for so long is not asked for again.
                    old = concurrency.monotonic() - times.LANE_MEMORY_SECS
                    self._answered = {key: a for key, a in self._answered.items() if a.at > old}
                    return self._version, self._capture(self._answered)
            finally:
                self._paused = False
                self._resumed.notify_all()
            if self._is_open:
                # A call under way may wait for a call that waits here, so the waiting calls run
                # first.
                self._work.wait(times.LEAST_PAUSE_SECS)
            return None

    def _note_arrived(self, version: int, unusable_because: str) -> None:
        with self._lock:
            before = "" if self._replicated < 0 else self._lost or self._unusable_because
            self._lost, self._unusable_because = "", unusable_because
            assert self._replicated <= version <= self._taken
            self._replicated = version
            self._arrived_at = concurrency.monotonic()
            self._arrived.notify_all()
        if unusable_because and unusable_because != before:
            logging.info("%s has no backup now: %s", self.task, unusable_because)
        elif before and not unusable_because:
            logging.info("%s has a backup at %s from now on", self.task, self.holder)

    def _note_lost(self, reason: str) -> None:
        with self._lock:
            # A holder that starts later than its primary is not lost, and each loss is logged once.
            fresh = not self._lost and self._replicated >= 0 and self._is_open
            self._lost = reason or "no contact"
            self._arrived.notify_all()
        if fresh:
            logging.warning(
                "%s has no backup until %s is back: what dies now as well comes back from the "
                "checkpoint (%s)",
                self.task,
                self.holder,
                reason,
            )


def _same(one: object, other: object) -> bool:
    return one is other or (isinstance(one, str | int | tuple) and one == other)
