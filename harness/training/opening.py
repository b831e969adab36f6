"""Opening a session again and again, until one is accepted, time is up or nobody wants it any more."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import runtime as rt
from harness.coordinator import Patience

ATTEMPT_SECS = 10.0
"""How long one attempt to open a session or one blocking wait takes; after each it is looked whether to stop."""
FIRST_BACKOFF_SECS = 0.05
LAST_BACKOFF_SECS = 1.0
"""Pauses between two attempts: from, doubling, to."""
PROBE_SECS = 1.0
"""How often the chief looks whether a task is lost that its own steps do not need just now."""
GIVE_UP_SECS = 7200.0
"""How long a session is waited for by default, at the start and in each recovery."""
LOST_CONTACT = (rt.UnavailableError, rt.AbortedError)
"""What a new session can cure: a task is gone, or has restarted, or its variables were restored."""


class TrainingOver(rt.OutOfRangeError):
    """The chief has finished training: a clean end for everybody else.

    It has a type of its own, as functions of the user's that make the model ready may raise any other OutOfRangeError.
    """


Reopen = Callable[[], rt.Session]
Attempt = Callable[[rt.Session, Reopen], rt.Session | None]
"""``(session, reopen) -> session``: makes a session ready and gives it, or the one that ``reopen`` gave; None means
that it is worth another try."""


def limit_secs(config: rt.SessionConfig | None, max_wait_secs: float | None) -> float:
    """How long a session is waited for, seconds.

    Args:
        config: its ``start_timeout_secs`` counts where it is less.
        max_wait_secs: what was asked for; None is without a limit.
    """
    start = None if config is None else config.start_timeout_secs
    return min(math.inf if secs is None else secs for secs in (start, max_wait_secs))


def for_recovery(config: rt.SessionConfig | None) -> rt.SessionConfig | None:
    """The options for opening a session again: ``start_timeout_secs`` is about the start of the cluster."""
    return None if config is None else replace(config, start_timeout_secs=None)


def until_accepted(
    attempt: Attempt,
    open_one: Callable[[float], rt.Session],
    patience: Patience,
    give_up_at: float,
    tell: Callable[[Exception], None],
) -> rt.Session:
    """Opens sessions until ``attempt`` accepts one. Loss of contact means another try, after a pause that doubles.

    Args:
        attempt: makes a session ready.
        open_one: opens a session within so many seconds.
        patience: ends it early.
        give_up_at: ``time.monotonic()`` when to give up.
        tell: is told of each lost contact.

    Raises:
        DeadlineExceededError: it is time to give up; tells the last reason.
        UnavailableError, AbortedError: patience has ended.
    """
    started = time.monotonic()
    backoff = FIRST_BACKOFF_SECS
    while True:
        opened: list[rt.Session] = []

        def reopen(opened: list[rt.Session] = opened) -> rt.Session:
            for old in opened:
                old.close()
            left = max(0.1, give_up_at - time.monotonic())
            try:
                opened.append(open_one(patience.at_most(min(left, ATTEMPT_SECS))))
            except rt.DeadlineExceededError as error:
                raise rt.UnavailableError(error.message, task=error.task) from None
            return opened[-1]

        accepted: rt.Session | None = None
        try:
            accepted = attempt(reopen(), reopen)
            if accepted is not None:
                return accepted
            backoff = FIRST_BACKOFF_SECS
        except LOST_CONTACT as error:
            waited = time.monotonic() - started
            if time.monotonic() >= give_up_at:
                raise rt.DeadlineExceededError(
                    f"Session was not ready after waiting {waited:.0f} secs: {error}"
                ) from error
            if patience.exhausted():
                raise
            tell(error)
            patience.wait(backoff)
            backoff = min(2 * backoff, LAST_BACKOFF_SECS)
        finally:
            if accepted is None:
                for session in opened:
                    session.close()
