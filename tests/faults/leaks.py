"""Leak checks: threads, processes, sockets and files that something has left behind."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Iterator

import psutil

from runtime import concurrency
from tests.faults.processes import ZygoteProcess

TIMEOUT_SECS = 5.0
"""How long what was told to end may take."""
_POLL_SECS = 0.02


@contextlib.contextmanager
def no_leaks(*, secs: float = TIMEOUT_SECS) -> Iterator[None]:
    """Checks that a block leaves no thread, process, socket or file behind.

        with no_leaks(), LocalCluster(["python", "train.py"]) as cluster:
            assert cluster.wait("worker:0") == 0

    Daemon threads and event descriptors do not count.

    Args:
        secs: Seconds that things may take to be gone after the block; five by default.

    Raises:
        AssertionError: Something was left; the message lists it. An error of the block itself comes
            first.
    """
    before = Counter(_list_holdings())
    yield
    # Threads and processes that were told to end need a moment.
    deadline = concurrency.monotonic() + secs
    while left := Counter(_list_holdings()) - before:
        if concurrency.monotonic() >= deadline:
            described = (what + f" x{count}" * (count > 1) for what, count in left.items())
            raise AssertionError(f"left behind: {'; '.join(described)}")
        # No event tells when a descriptor is closed.
        concurrency.Event().wait(_POLL_SECS)


def _list_holdings() -> Iterator[str]:
    """Describes what this process holds, as in "thread worker", "process 17 sleep" and "file /tmp/x"."""
    # Zygotes live as long as this process.
    lasting = ZygoteProcess.lasting_threads()
    yield from (
        f"thread {t.name}"
        for t in concurrency.running_threads()
        if t not in lasting and not t.daemon
    )
    yield from _list_children()
    yield from _list_descriptors()


def _list_children() -> Iterator[str]:
    lasting = ZygoteProcess.lasting_processes()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(child.cmdline())[:120]
            # Both live as long as this process: the tracker of shared memory, and the zygotes.
            if "resource_tracker" not in command and child.pid not in lasting:
                yield f"process {child.pid} {command or child.status()}"


def _list_descriptors() -> Iterator[str]:
    try:
        numbers = os.listdir("/proc/self/fd")
    # There is no /proc off Linux.
    except OSError:
        yield from (f"file {file.path}" for file in psutil.Process().open_files())
        return
    for number in sorted(set(map(int, numbers)) - ZygoteProcess.lasting_descriptors()):
        # The descriptor of the listing itself is closed already.
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith("socket:"):
                yield f"socket {_describe_socket(number)}"
            # gRPC opens and closes pollers at times of its own, so event descriptors do not count.
            elif not target.startswith(("/proc/", "anon_inode:")):
                yield f"file {target.partition(':[')[0]}"


def _describe_socket(descriptor: int) -> str:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as sock:
        family = (
            sock.family.name if isinstance(sock.family, socket.AddressFamily) else str(sock.family)
        )
        local = sock.getsockname()
        where = f" {local[0]}:{local[1]}" if isinstance(local, tuple) and len(local) > 1 else ""
        # The port that the system gave to an outgoing connection tells nothing.
        return (
            f"{family}{where}"
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            else family
        )
    return "closed"
