"""Threads of a program that stop together: the coordinator, the thread that repeats a call, the waits after a stop.

Supervisor and MonitoredSession have a ``Coordinator`` each. Services are ``LooperThread``s. A
``GracePeriod`` bounds each wait for a task that may be dead. Nothing here knows of a cluster, so a
program may use the three alone.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import cast

from harness import timeouts
from runtime import (
    CancelledError,
    OutOfRangeError,
    Session,
    SessionLike,
    UnavailableError,
    concurrency,
)

_log = logging.getLogger(__name__)

ExcInfo = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]


class Coordinator:
    """Stops a group of threads together.

        coord = Coordinator()
        threads = [threading.Thread(target=work, args=(coord,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        coord.join(threads)         # re-raises the first error of any thread

        def work(coord):
            with coord.stop_on_exception():
                while not coord.should_stop():
                    ...

    All methods may be called from any thread, and `request_stop` from a signal handler too.

    Args:
        clean_stop_exception_types: Exceptions that mean a stop without an error. Default: the end
            of the input, `(OutOfRangeError,)`.
    """

    def __init__(
        self, clean_stop_exception_types: Iterable[type[BaseException]] | None = None
    ) -> None:
        """See the class."""
        self._clean_types = (
            (OutOfRangeError,)
            if clean_stop_exception_types is None
            else tuple(clean_stop_exception_types)
        )
        # The condition guards all attributes below. Its lock is re-entrant, unlike that of
        # threading.Event: a signal handler may interrupt the very thread that is inside one of
        # these methods, and call request_stop.
        self._changed = concurrency.Condition()
        self._stopping = False
        self._joined = False
        self._error: tuple[BaseException, TracebackType | None] | None = None
        self._registered: set[concurrency.Thread] = set()

    def request_stop(self, ex: BaseException | ExcInfo | None = None) -> None:
        """Stops all threads: `should_stop` is true from now on.

        The first request decides: `join` raises its exception. The exceptions of later requests are
        only logged, as most are consequences of the stop.

        Args:
            ex: Reason, as an exception or as `sys.exc_info()`; None, or a clean type, for no error.

        Raises:
            TypeError: `ex` is of another type.
            BaseException: `ex` itself, after the end of `join`, which cannot raise it any more.
        """
        error = ex[1] if isinstance(ex, tuple) else ex
        if error is not None and not isinstance(error, BaseException):
            raise TypeError(f"request_stop() takes an exception or sys.exc_info(), got {ex!r}")
        failed = error is not None and not isinstance(error, self._clean_types)
        with self._changed:
            first, joined = not self._stopping, self._joined
            if first and failed and error is not None and not joined:
                self._error = (error, error.__traceback__)
            again = not first and self._error is not None and self._error[0] is error
            # After join() a failure is raised here and stops nothing: no thread is left.
            self._stopping = self._stopping or not (joined and failed)
            assert self._stopping or self._error is None, "an error is a stop"
            self._changed.notify_all()
        if not failed or error is None:
            return
        if joined:
            raise error
        # `join` raises this very error, so no line in the log is needed.
        if again:
            return
        how = "error reported to coordinator" if first else "error after the stop, not raised"
        _log.log(
            logging.ERROR if first else logging.WARNING,
            "%s: %s: %s",
            how,
            type(error).__name__,
            error,
        )

    def clear_stop(self) -> None:
        """Forgets the stop, its exception and the join, for another round with new threads."""
        with self._changed:
            self._stopping = False
            self._joined = False
            self._error = None

    def should_stop(self) -> bool:
        """Returns True after a stop was requested."""
        with self._changed:
            return self._stopping

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Waits until a stop is requested.

        Args:
            timeout: Seconds to wait at most. 0 or less does not wait; None and infinity wait
                without a limit.

        Returns:
            True if a stop was requested.
        """
        limit = None if timeout is None else min(timeout, timeouts.LONGEST_SECS)
        with self._changed:
            return self._changed.wait_for(lambda: self._stopping, limit)

    @contextlib.contextmanager
    def stop_on_exception(self) -> Iterator[None]:
        """Turns any exception of the block, KeyboardInterrupt too, into a `request_stop`, and continues after."""
        try:
            yield
        except BaseException as error:
            self.request_stop(error)

    def register_thread(self, thread: concurrency.Thread) -> None:
        """Makes `join` wait for a thread."""
        with self._changed:
            self._registered.add(thread)

    def join(
        self,
        threads: Iterable[concurrency.Thread] | None = None,
        stop_grace_period_secs: float = 120,
        ignore_live_threads: bool = False,
    ) -> None:
        """Waits until threads end: without a limit before a stop, and for the grace period after a stop.

        Args:
            threads: Threads to wait for, beside the registered threads. The registration ends with
                the wait.
            stop_grace_period_secs: Seconds that threads have to end after a stop.
            ignore_live_threads: True to only log threads that are alive after the grace period.

        Raises:
            BaseException: The error that stopped the threads, with its traceback. This error comes
                before the next.
            RuntimeError: Threads are alive after the grace period. The message names them.
        """
        with self._changed:
            covered = {*self._registered, *(threads or ())}
        waited = covered - {concurrency.current_thread()}
        watcher = self._wait_for_end_or_stop(waited)
        deadline = concurrency.monotonic() + stop_grace_period_secs
        while (alive := _living_threads(waited)) and (
            left := deadline - concurrency.monotonic()
        ) > 0:
            _join_all(alive, min(left, timeouts.LOG_EVERY_SECS))
            if still := _living_threads(waited):
                _log.info(
                    "stopping: %.0f s left for threads %s",
                    max(0.0, deadline - concurrency.monotonic()),
                    _thread_names(still),
                )
        if watcher is not None and not alive:
            watcher.result()
        with self._changed:
            self._joined = True
            self._registered -= covered
        self.raise_requested_exception()
        if not alive:
            return
        text = f"Coordinator stopped with threads still running: {_thread_names(alive)}"
        if not ignore_live_threads:
            raise RuntimeError(text)
        _log.info(text)

    @property
    def joined(self) -> bool:
        """True after the end of `join`."""
        with self._changed:
            return self._joined

    @property
    def failed(self) -> bool:
        """True if an exception has stopped the threads."""
        with self._changed:
            return self._error is not None

    def raise_requested_exception(self) -> None:
        """Raises the exception that stopped the threads, with its traceback; returns when there is none.

        The exception stays recorded.
        """
        with self._changed:
            recorded = self._error
        if recorded is not None:
            # Each raise adds frames to the exception, so the traceback starts again from the frames
            # of the thread.
            raise recorded[0].with_traceback(recorded[1])

    def _wait_for_end_or_stop(self, threads: set[concurrency.Thread]) -> Future[None] | None:
        """Waits for a stop, or for the last thread to end; returns the helper of the wait, None without one.

        The helper is done with the last of `threads`.
        """
        if self.should_stop() or not _living_threads(threads):
            return None
        # Python has no event for the end of a thread, so the helper joins the threads and then
        # notifies this wait.
        watcher = concurrency.in_thread(
            functools.partial(self._tell_end, threads), "coordinator-join"
        )
        with self._changed:
            while not self._changed.wait_for(
                lambda: self._stopping or not _living_threads(threads), timeouts.LOG_EVERY_SECS
            ):
                _log.warning(
                    "waiting for a stop, or for the end of threads %s",
                    _thread_names(_living_threads(threads)),
                )
        return watcher

    def _tell_end(self, threads: set[concurrency.Thread]) -> None:
        for thread in _living_threads(threads):
            thread.join()
        with self._changed:
            self._changed.notify_all()


def create_threads(
    calls: Mapping[str, Callable[[], object]],
    owner: str,
    coord: Coordinator | None,
    *,
    daemon: bool,
    start: bool,
) -> list[concurrency.Thread]:
    """Returns a thread for each call, registered with a coordinator.

    Args:
        calls: Functions by name of the thread.
        owner: Name of the object that the threads belong to.
        coord: Coordinator of the threads; None for threads that nothing joins.
        daemon: True for threads that may be left behind when the process ends.
        start: True to start the threads.

    Examples:
        >>> coord = Coordinator()
        >>> threads = create_threads({"an example": coord.request_stop}, "example", coord, daemon=True, start=True)
        >>> coord.join(threads)
        >>> coord.should_stop()
        True
    """
    group = concurrency.ThreadGroup(owner, daemon=daemon)
    threads = [group.create(call, name=name) for name, call in calls.items()]
    for thread in threads:
        if coord is not None:
            coord.register_thread(thread)
        if start:
            thread.start()
    return threads


def _living_threads(threads: Iterable[concurrency.Thread]) -> list[concurrency.Thread]:
    return sorted(
        (thread for thread in threads if thread.is_alive()), key=lambda thread: thread.name
    )


def _join_all(threads: Iterable[concurrency.Thread], timeout: float) -> None:
    """Waits until all threads have ended, at most `timeout` seconds together."""
    deadline = concurrency.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - concurrency.monotonic()))


def _thread_names(threads: Iterable[concurrency.Thread]) -> str:
    return " ".join(thread.name for thread in threads)


@contextlib.contextmanager
def while_open(session: object) -> Iterator[None]:
    """Ends a service's block in silence when the program has closed the session meanwhile.

    Args:
        session: Session that the block uses.
    """
    try:
        yield
    # A task that has the goodbye already answers a late order with UnavailableError.
    except (CancelledError, UnavailableError, RuntimeError) as error:
        if not getattr(session, "closed", False):
            raise
        _log.info("the session was closed, a service has nothing left to do: %s", error)


def underlying(session: SessionLike) -> Session:
    """Returns the session underneath a session that recovers or has hooks; any other session itself.

    Args:
        session: A session, a ``ManagedSession`` or a ``MonitoredSession``.
    """
    return cast(Session, getattr(session, "raw", session))


class LooperThread(concurrency.Thread):
    """A daemon thread that repeats a call, and stops with its coordinator.

    The thread calls `start_loop` once, `run_loop` at once and then every interval, and `stop_loop`
    once after a stop. An exception in a call stops the coordinator, and `stop_loop` is not called
    then. After a call that took longer than the interval, or a pause of the process, one call makes
    up for all missed calls. A subclass overrides the three methods, or the caller gives a target.

    Args:
        coord: Coordinator that stops this thread and receives its exceptions; `coord.join()` waits
            for the thread.
        timer_interval_secs: Seconds from the start of one call to the start of the next; None for
            no pause.
        target: Function that `run_loop` calls.
        args: Positional arguments of `target`.
        kwargs: Keyword arguments of `target`.

    Raises:
        ValueError: `coord` is not a `Coordinator`, or there are arguments without a target.
    """

    def __init__(
        self,
        coord: Coordinator,
        timer_interval_secs: float | None,
        target: Callable[..., object] | None = None,
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> None:
        """See the class."""
        if not isinstance(coord, Coordinator):
            raise ValueError(f"coord must be a Coordinator, got {coord!r}")
        if target is None and (args or kwargs):
            raise ValueError("args and kwargs need a target")
        # join() reports this name when the thread does not end, so "Thread-5" would not do.
        super().__init__(name=getattr(target, "__name__", type(self).__name__), daemon=True)
        self._coord = coord
        self._interval = timer_interval_secs
        self._call = target
        self._call_args = tuple(args or ())
        self._call_kwargs = dict(kwargs or {})
        coord.register_thread(self)

    @staticmethod
    def loop(
        coord: Coordinator,
        timer_interval_secs: float | None,
        target: Callable[..., object],
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> "LooperThread":
        """Starts a thread that calls `target(*args, **kwargs)` every `timer_interval_secs` seconds.

        Args:
            coord: Coordinator that stops the thread.
            timer_interval_secs: Seconds from the start of one call to the start of the next; None
                for no pause.
            target: Function that the thread calls.
            args: Positional arguments of `target`.
            kwargs: Keyword arguments of `target`.
        """
        looper = LooperThread(coord, timer_interval_secs, target=target, args=args, kwargs=kwargs)
        looper.start()
        return looper

    def run(self) -> None:
        """Calls the three methods until the coordinator stops."""
        with self._coord.stop_on_exception():
            self.start_loop()
            due = concurrency.monotonic()
            while not self._coord.wait_for_stop(due - concurrency.monotonic()):
                self.run_loop()
                due = max(due + (self._interval or 0.0), concurrency.monotonic())
            self.stop_loop()

    def start_loop(self) -> None:
        """Prepares the thread, before the first `run_loop`. Does nothing here."""

    def run_loop(self) -> None:
        """Does the work of one interval: calls the target."""
        if self._call is not None:
            self._call(*self._call_args, **self._call_kwargs)

    def stop_loop(self) -> None:
        """Cleans up after a stop without a failure of this thread. Does nothing here."""


class GracePeriod:
    """The bound of waits for tasks that may be dead: a while after a stop, and at once after a failure.

    Args:
        coord: Coordinator with the stop and the failure.
        grace_secs: Seconds that waits may last after a stop without a failure.
    """

    def __init__(self, coord: Coordinator, grace_secs: float = timeouts.STOP_GRACE_SECS) -> None:
        self.coord = coord
        self.grace_secs = grace_secs
        self._stopped_at: float | None = None
        self._over = concurrency.Event()
        self.deadline: float | None = None
        """Time on ``time.monotonic()`` at which the period ends even without a stop; None for no such time."""

    def exhausted(self) -> bool:
        """Returns True when waits are to end."""
        if self._over.is_set() or (
            self.deadline is not None and concurrency.monotonic() >= self.deadline
        ):
            return True
        if not self.coord.should_stop():
            self._stopped_at = None
            return False
        if self._stopped_at is None:
            self._stopped_at = concurrency.monotonic()
        return self.coord.failed or concurrency.monotonic() - self._stopped_at >= self.grace_secs

    def at_most(self, secs: float) -> float:
        """Returns ``secs``, or the seconds that are left if less, and 0.1 at least.

        Args:
            secs: Seconds that a wait may take.
        """
        # This notes the time of the stop.
        self.exhausted()
        ends = [] if self.deadline is None else [self.deadline]
        if self._stopped_at is not None:
            ends.append(self._stopped_at + self.grace_secs)
        return min([secs, *(max(0.1, end - concurrency.monotonic()) for end in ends)])

    def wait(self, secs: float) -> None:
        """Waits some seconds; a stop, or the end of the period, ends the wait early.

        Args:
            secs: Seconds to wait at most; after a stop at most a second.
        """
        if self.coord.should_stop():
            self._over.wait(min(secs, 1.0))
        else:
            self.coord.wait_for_stop(secs)

    def renew(self) -> None:
        """Begins another period, for another session."""
        self._over.clear()
        self._stopped_at = self.deadline = None

    def start_again(self) -> None:
        """Gives the whole period again, however long ago the stop was: contact was lost just now."""
        self._stopped_at = None

    def end(self) -> None:
        """Ends all waits now."""
        self._over.set()
