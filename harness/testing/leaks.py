"""Leak checks: threads, processes, sockets and files that something has left behind."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

from harness.testing.processes import Zygote

TIMEOUT_SECS = 5.0
"""How long what was told to end may take."""
_POLL_SECS = 0.02


@dataclass(frozen=True)
class Holdings:
    """What this process holds.

    Attributes:
        threads: names of its threads.
        processes: its children and theirs, as "pid command".
        sockets: its sockets, described.
        files: its open files and pipes, described; event descriptors do not count.
    """

    threads: Counter[str]
    processes: Counter[str]
    sockets: Counter[str]
    files: Counter[str]

    @classmethod
    def now(cls, *, daemons: bool = False) -> Holdings:
        """What is held at this moment.

        Args:
            daemons: count daemon threads too.
        """
        lasting = Zygote.lasting_threads()
        found = [t for t in threading.enumerate() if t not in lasting and (daemons or not t.daemon)]
        threads = Counter(t.name for t in found)
        sockets, files = _descriptors()
        return cls(threads, Counter(_children()), sockets, files)

    def beyond(self, before: Holdings) -> list[str]:
        """What there is more of than before, described."""
        more = []
        for kind in ("threads", "processes", "sockets", "files"):
            for what, count in (getattr(self, kind) - getattr(before, kind)).items():
                more.append(f"{kind[:-1] if kind != 'processes' else 'process'} {what}" + f" x{count}" * (count > 1))
        return more


@contextlib.contextmanager
def no_leaks(
    *, secs: float = TIMEOUT_SECS, daemons: bool = False, ignore: Callable[[str], bool] = lambda what: False
) -> Iterator[None]:
    """Checks that a block leaves no thread, process, socket or file behind.

    Args:
        secs: how long things may take to be gone after the block.
        daemons: look at daemon threads too.
        ignore: says of a description, such as "file /tmp/x", that it does not count.

    Raises:
        AssertionError: something was left; lists it. Not raised over an error of the block itself.
    """
    before = Holdings.now(daemons=daemons)
    yield
    deadline = time.monotonic() + secs
    while True:
        left = [what for what in Holdings.now(daemons=daemons).beyond(before) if not ignore(what)]
        if not left:
            return
        if time.monotonic() >= deadline:
            raise AssertionError(f"left behind: {'; '.join(left)}")
        threading.Event().wait(_POLL_SECS)  # nobody tells when a descriptor is closed


def _children() -> Iterator[str]:
    lasting = Zygote.lasting_processes()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(child.cmdline())[:120]
            if "resource_tracker" not in command and child.pid not in lasting:  # for the life of this process
                yield f"{child.pid} {command or child.status()}"


def _descriptors() -> tuple[Counter[str], Counter[str]]:
    sockets: Counter[str] = Counter()
    files: Counter[str] = Counter()
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:  # not Linux
        return sockets, Counter(file.path for file in psutil.Process().open_files())
    for number in sorted(set(map(int, numbers)) - Zygote.lasting_descriptors()):
        with contextlib.suppress(OSError):  # the one that listed them is closed already
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith("socket:"):
                sockets[_described(number)] += 1
            elif not target.startswith(("/proc/", "anon_inode:")):  # gRPC makes and drops pollers at times of its own
                files[target.partition(":[")[0]] += 1
    return sockets, files


def _described(descriptor: int) -> str:
    import socket

    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as sock:
        family = sock.family.name if isinstance(sock.family, socket.AddressFamily) else str(sock.family)
        local = sock.getsockname()
        where = f" {local[0]}:{local[1]}" if isinstance(local, tuple) and len(local) > 1 else ""
        # The port that the system gave to an outgoing connection tells nothing.
        return f"{family}{where}" if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) else family
    return "closed"
