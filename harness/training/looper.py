"""The looper thread: something done again and again until the coordinator stops."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from harness.coordinator import Coordinator
from runtime import CancelledError

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def while_open(session: Any) -> Iterator[None]:
    """What a service does with a session: it is no failure when the program closes that meanwhile."""
    try:
        yield
    except (CancelledError, RuntimeError) as error:
        if not getattr(session, "closed", False):
            raise
        _log.info("the session was closed, a service has nothing left to do: %s", error)


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
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
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
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> "LooperThread":
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
