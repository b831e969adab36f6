"""Threads of a program that stop together: the coordinator, the thread that repeats a call, the waits after a stop."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from runtime import CancelledError, OutOfRangeError, Session

_log = logging.getLogger(__name__)

_LOG_EVERY_SECS = 10.0
"""How often a wait says for whom."""

LONGEST_SECS = 1e9
"""Waits are no longer (31 years): Python's end with an error where a C clock does, and infinity is beyond it."""

STOP_GRACE_SECS = 120.0
"""How long threads, steps under way and other workers have to end after a stop, by default."""

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
        clean_stop_exception_types: exceptions that mean a stop without an error; by default the end of the input,
            `(OutOfRangeError,)`.
    """

    def __init__(self, clean_stop_exception_types: Iterable[type[BaseException]] | None = None) -> None:
        """See the class."""
        self._clean_types = (
            (OutOfRangeError,) if clean_stop_exception_types is None else tuple(clean_stop_exception_types)
        )
        # Guards all that follows. It has a re-entrant lock, where threading.Event has not: a signal handler may
        # interrupt the very thread that is inside one of these methods, and call request_stop.
        self._changed = threading.Condition()
        self._stopping = False
        self._joined = False
        self._error: tuple[BaseException, TracebackType | None] | None = None
        self._registered: set[threading.Thread] = set()

    def request_stop(self, ex: BaseException | ExcInfo | None = None) -> None:
        """Asks all threads to stop; `should_stop` is true from now on.

        The first request decides: its exception, if any, is what `join` raises, and later ones are only logged (they
        tend to be consequences of the stop).

        Args:
            ex: why, as an exception or as `sys.exc_info()`; None, or one of the clean types, for no error.

        Raises:
            TypeError: `ex` is something else.
            BaseException: `ex` itself, when `join` is over and could not report it any more.
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
            # After join() a failure is raised here and stops nothing: there is nobody left to stop.
            self._stopping = self._stopping or not (joined and failed)
            self._changed.notify_all()
        if not failed or error is None:
            return
        if joined:
            raise error
        if again:  # `join` raises it
            return
        how = "error reported to coordinator" if first else "error after the stop, not raised"
        _log.log(logging.ERROR if first else logging.WARNING, "%s: %s: %s", how, type(error).__name__, error)

    def clear_stop(self) -> None:
        """Forgets the stop, its exception and the join, for another round with new threads."""
        with self._changed:
            self._stopping = False
            self._joined = False
            self._error = None

    def should_stop(self) -> bool:
        """Whether a stop was requested."""
        with self._changed:
            return self._stopping

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Waits until a stop is requested.

        Args:
            timeout: seconds to wait at most; not above 0 only looks, None waits without limit, as infinity does.

        Returns:
            Whether a stop was requested.
        """
        limit = None if timeout is None else min(timeout, LONGEST_SECS)
        with self._changed:
            return self._changed.wait_for(lambda: self._stopping, limit)

    @contextlib.contextmanager
    def stop_on_exception(self) -> Iterator[None]:
        """Turns any exception within, KeyboardInterrupt too, into a `request_stop` with it, and goes on after."""
        try:
            yield
        except BaseException as error:
            self.request_stop(error)

    def register_thread(self, thread: threading.Thread) -> None:
        """Makes `join` wait for a thread."""
        with self._changed:
            self._registered.add(thread)

    def join(
        self,
        threads: Iterable[threading.Thread] | None = None,
        stop_grace_period_secs: float = 120,
        ignore_live_threads: bool = False,
    ) -> None:
        """Waits for threads to end: without limit until a stop is requested, and for the grace period after that.

        Args:
            threads: whom to wait for, beside the registered threads; their registration is over then.
            stop_grace_period_secs: seconds that threads have to end once a stop is requested.
            ignore_live_threads: only log threads that are alive after the grace period.

        Raises:
            BaseException: what stopped the threads, with its traceback; this comes before the next.
            RuntimeError: threads are alive after the grace period; tells their names.
        """
        with self._changed:
            covered = {*self._registered, *(threads or ())}
        waited = covered - {threading.current_thread()}
        watcher = self._wait_for_end_or_stop(waited)
        deadline = time.monotonic() + stop_grace_period_secs
        while (alive := _alive(waited)) and (left := deadline - time.monotonic()) > 0:
            _join_all(alive, min(left, _LOG_EVERY_SECS))
            if still := _alive(waited):
                _log.info("stopping: %.0f s left for threads %s", max(0.0, deadline - time.monotonic()), _names(still))
        if watcher is not None and not alive:
            watcher.join()
        with self._changed:
            self._joined = True
            self._registered -= covered
        self.raise_requested_exception()
        if not alive:
            return
        text = f"Coordinator stopped with threads still running: {_names(alive)}"
        if not ignore_live_threads:
            raise RuntimeError(text)
        _log.info(text)

    @property
    def joined(self) -> bool:
        """Whether `join` is over."""
        with self._changed:
            return self._joined

    def raise_requested_exception(self) -> None:
        """Raises the exception that stopped the threads, with its traceback, if there is one; it stays recorded."""
        with self._changed:
            recorded = self._error
        if recorded is not None:
            # Each raise adds frames to the exception: start again from those of the thread.
            raise recorded[0].with_traceback(recorded[1])

    def _wait_for_end_or_stop(self, threads: set[threading.Thread]) -> threading.Thread | None:
        """Returns the helper thread that this needed, if any; it ends when the last of `threads` does."""
        if self.should_stop() or not _alive(threads):
            return None
        # Nobody tells when a thread ends: somebody has to sit and wait for it.
        watcher = threading.Thread(target=self._log_when_ended, args=(threads,), name="coordinator-join", daemon=True)
        watcher.start()
        with self._changed:
            while not self._changed.wait_for(lambda: self._stopping or not _alive(threads), _LOG_EVERY_SECS):
                _log.warning("waiting for a stop, or for the end of threads %s", _names(_alive(threads)))
        return watcher

    def _log_when_ended(self, threads: set[threading.Thread]) -> None:
        for thread in _alive(threads):
            thread.join()
        with self._changed:
            self._changed.notify_all()


def _alive(threads: Iterable[threading.Thread]) -> list[threading.Thread]:
    return sorted((thread for thread in threads if thread.is_alive()), key=lambda thread: thread.name)


def _join_all(threads: Iterable[threading.Thread], timeout: float) -> None:
    """Waits until all threads have ended, `timeout` seconds at most."""
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _names(threads: Iterable[threading.Thread]) -> str:
    return " ".join(thread.name for thread in threads)


@contextlib.contextmanager
def while_open(session: object) -> Iterator[None]:
    """What a service does with a session: it is no failure when the program closes that meanwhile."""
    try:
        yield
    except (CancelledError, RuntimeError) as error:
        if not getattr(session, "closed", False):
            raise
        _log.info("the session was closed, a service has nothing left to do: %s", error)


def underlying(session: Any) -> Session:
    """Returns the session underneath one that recovers or has hooks; of any other session, the session itself.

    Args:
        session: A session, a ``ManagedSession`` or a ``MonitoredSession``.
    """
    found: Session = getattr(session, "raw", session)
    return found


class LooperThread(threading.Thread):
    """A daemon thread that repeats a call, and stops with its coordinator.

    It calls `start_loop` once, `run_loop` at once and then every interval, and `stop_loop` once after a stop. An
    exception in any of them stops the coordinator with it; then `stop_loop` is not called. Runs that were missed, as
    one took longer than the interval or the process was suspended, are made up for by one. Subclasses override these
    three; or give a target.

    Args:
        coord: stops this thread, and gets its exceptions; `coord.join()` waits for it.
        timer_interval_secs: seconds from the start of one call to the start of the next; None for no pause.
        target: what `run_loop` calls.
        args: positional arguments of `target`.
        kwargs: keyword arguments of `target`.

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
        # A name that tells something: it is what join() reports when this thread does not end.
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
    ) -> LooperThread:
        """Starts a thread that calls `target(*args, **kwargs)` every `timer_interval_secs` seconds."""
        looper = LooperThread(coord, timer_interval_secs, target=target, args=args, kwargs=kwargs)
        looper.start()
        return looper

    def run(self) -> None:
        """The life of the thread."""
        with self._coord.stop_on_exception():
            self.start_loop()
            due = time.monotonic()
            while not self._coord.wait_for_stop(due - time.monotonic()):
                self.run_loop()
                due = max(due + (self._interval or 0.0), time.monotonic())
            self.stop_loop()

    def start_loop(self) -> None:
        """Called once before the first `run_loop`; does nothing here."""

    def run_loop(self) -> None:
        """Called at every interval; calls the target here."""
        if self._call is not None:
            self._call(*self._call_args, **self._call_kwargs)

    def stop_loop(self) -> None:
        """Called once after a stop that was not this thread's failure; does nothing here."""


class GracePeriod:
    """Bounds waits for tasks that may be dead: they end a while after a stop, and at once after a failure.

    Args:
        coord: tells of stops and failures.
        grace_secs: how long waits may go on after a stop without a failure.
    """

    def __init__(self, coord: Coordinator, grace_secs: float = STOP_GRACE_SECS) -> None:
        self.coord = coord
        self.grace_secs = grace_secs
        self._stopped_at: float | None = None
        self._over = threading.Event()
        self.deadline: float | None = None
        """``time.monotonic()`` when the grace period ends even without a stop."""

    def exhausted(self) -> bool:
        """Whether it is time to give up."""
        if self._over.is_set() or (self.deadline is not None and time.monotonic() >= self.deadline):
            return True
        if not self.coord.should_stop():
            self._stopped_at = None
            return False
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
        return failed(self.coord) or time.monotonic() - self._stopped_at >= self.grace_secs

    def at_most(self, secs: float) -> float:
        """``secs``, or the time that is left when that is less."""
        self.exhausted()  # notes when the stop came
        ends = [] if self.deadline is None else [self.deadline]
        if self._stopped_at is not None:
            ends.append(self._stopped_at + self.grace_secs)
        return min([secs, *(max(0.1, end - time.monotonic()) for end in ends)])

    def wait(self, secs: float) -> None:
        """Waits, less long when the grace period ends meanwhile or a stop is requested."""
        if self.coord.should_stop():
            self._over.wait(min(secs, 1.0))
        else:
            self.coord.wait_for_stop(secs)

    def renew(self) -> None:
        """Begins anew, for another session."""
        self._over.clear()
        self._stopped_at = self.deadline = None

    def start_again(self) -> None:
        """Contact was lost just now: the whole grace period is there again, however long ago the stop was."""
        self._stopped_at = None

    def end(self) -> None:
        """Ends all waits now."""
        self._over.set()


def failed(coord: Coordinator) -> bool:
    """Whether a coordinator was stopped by an exception."""
    try:
        coord.raise_requested_exception()
    except BaseException:  # noqa: B036 - it is looked at, not handled: join() raises it again
        return True
    return False
