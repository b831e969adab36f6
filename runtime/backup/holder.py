"""The holder of backups: a task keeps an image of its neighbour, so that the neighbour can go on after its death.

A task is described by entries: names, each with a few words (JSON) and some arrays. Its *image* is all of them as of
one instant. The task, the *primary*, sends what has changed since the last image; the holder completes a new image from
that, or keeps the one before: an image is whole or absent. The holder does not know what the entries mean.

A process that starts as a task draws a random process id. The process that introduced itself last, or took the image up
last, is the primary. What an earlier process of the task (a frozen one that was replaced) still sends is refused, also
when that process has not sent anything before.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.observe.audit import AuditLog
from runtime.tensor_spec import Array

CHUNK_BYTES = 64 << 20
"""Bytes of arrays after which a message ends and the next one begins."""

_PROCESSES_KEPT = 64
"""Process ids remembered of one task."""

Header = dict[str, Any]
REFUSED_BASE, REFUSED_PROCESS = "base", "process_id"


@dataclass(frozen=True)
class Entry:
    """A part of a task.

    Attributes:
        meta: what JSON can say.
        arrays: numpy arrays that nobody changes.
    """

    meta: Any
    arrays: tuple[Array, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays; strings count as nothing."""
        return sum(0 if a.dtype == object else a.nbytes for a in self.arrays)


@dataclass(frozen=True)
class BackupImage:
    """A task as of one instant.

    Attributes:
        version: counts the task's updates.
        about: what the holder hands to the process that asks for the image.
        unusable_because: why the task cannot go on from it; empty when it can.
        entries: by name.
    """

    version: int
    about: Mapping[str, Any]
    unusable_because: str
    entries: Mapping[str, Entry]


def chunks(entries: Mapping[str, Entry], limit: int = CHUNK_BYTES) -> list[dict[str, Entry]]:
    """Splits entries into messages, at least one, each of ``limit`` bytes at most unless one entry alone has more."""
    messages: list[dict[str, Entry]] = [{}]
    size = 0
    for name, entry in entries.items():
        if messages[-1] and size + entry.nbytes > limit:
            messages.append({})
            size = 0
        messages[-1][name] = entry
        size += entry.nbytes
    return messages


def packed(entries: Mapping[str, Entry]) -> tuple[list[Any], list[Array]]:
    """Entries as a part of a header and a row of arrays; ``unpacked`` is the way back."""
    table = [[name, entry.meta, len(entry.arrays)] for name, entry in entries.items()]
    return table, [array for entry in entries.values() for array in entry.arrays]


def unpacked(table: Sequence[Any], arrays: Sequence[Array], *, copy: bool = True) -> dict[str, Entry]:
    """The entries that ``packed`` packed.

    Args:
        table: of the header.
        arrays: all of them.
        copy: the arrays lie in memory that will be used again.
    """
    rest = iter(arrays)
    found = {}
    for name, meta, count in table:
        taken = itertools.islice(rest, count)
        found[name] = Entry(meta, tuple(np.array(a) if copy else a for a in taken))
    return found


class BackupHolder:
    """Holds the images of other tasks, by their names. Thread safe.

    Memory: one image of each, and while a new one comes in what has changed in it.

    Args:
        audit: log of the task that holds them.
        check: raises PermissionDeniedError unless who is calling is the task of this name.
    """

    def __init__(self, audit: AuditLog | None = None, check: Callable[[str], None] = lambda task: None) -> None:
        self._audit = audit
        self._check = check
        self._lock = threading.Lock()
        self._images: dict[str, BackupImage] = {}
        self._coming: dict[str, tuple[int, int, dict[str, Entry]]] = {}  # process id, version, entries so far
        self._process_ids: dict[str, list[int]] = {}
        """By task, the process ids that were introduced; the last one is that of the primary."""

    def answer_message(self, message: Sequence[Array]) -> list[Array]:
        """Answers a message as it travels: see ``packed_message``."""
        return packed_message(*self.answer(*read_message(message)))

    def answer(self, header: Header, arrays: Sequence[Array]) -> tuple[Header, list[Array]]:
        """Answers one message: ``push`` (see ``Primary``) or ``take``."""
        first = header["index"] == 0
        self._check(header["of"])
        if header["kind"] == "take":
            reply, images = self._take(header)
            if first:
                self._tell("backup.take", header["of"], "ok" if reply["found"] else "nothing there")
            return reply, images
        if first and header["hello"]:
            self._tell("backup.begin", header["of"], "ok")
        return self._push(header, arrays), []

    def _tell(self, action: str, task: str, outcome: str) -> None:
        if self._audit is not None:
            self._audit.write(action, peer="", what=task, outcome=outcome)

    def image(self, task: str) -> BackupImage | None:
        """What is kept of a task."""
        with self._lock:
            return self._images.get(task)

    def drop_all(self) -> None:
        """Forgets all images: what they show is about to be replaced. New ones come whole."""
        with self._lock:
            self._images.clear()
            self._coming.clear()

    def _push(self, header: Header, arrays: Sequence[Array]) -> Header:
        task, process_id, version, base = header["of"], header["process_id"], header["version"], header["base"]
        came = unpacked(header["put"], arrays)
        with self._lock:
            known = self._process_ids.get(task, [])
            if process_id in known[:-1] or known and known[-1] != process_id and not header["hello"]:
                return {"refused": REFUSED_PROCESS}
            self._introduce(task, process_id)
            kept = self._images.get(task)
            if base is not None and (
                kept is None or kept.version != base or kept.about.get("process_id") != process_id
            ):
                return {"refused": REFUSED_BASE}
            if header["index"] == 0:
                self._coming[task] = (process_id, version, came)
            else:
                coming = self._coming.get(task)
                if coming is None or coming[:2] != (process_id, version):
                    return {"refused": REFUSED_BASE}
                coming[2].update(came)
            if "keep" not in header:
                return {}
            entries = self._coming.pop(task)[2]
            before = {} if base is None or kept is None else kept.entries
            whole = {name: entries[name] if name in entries else before[name] for name in header["keep"]}
            self._images[task] = BackupImage(
                version, {**header["about"], "process_id": process_id}, header["unusable_because"], whole
            )
            return {}

    def _introduce(self, task: str, process_id: int) -> None:
        known = self._process_ids.setdefault(task, [])
        if process_id not in known:
            known.append(process_id)
            del known[:-_PROCESSES_KEPT]

    def _take(self, header: Header) -> tuple[Header, list[Array]]:
        task, index = header["of"], header["index"]
        with self._lock:
            if index == 0:
                self._introduce(task, header["process_id"])  # earlier processes of the task have lost their place
            image = self._images.get(task)
        if image is None or image.unusable_because:
            return {"found": False, "why": image.unusable_because if image is not None else "it has none"}, []
        messages = chunks(image.entries)
        table, arrays = packed(messages[index])
        about = dict(image.about)
        return {
            "found": True,
            "about": about,
            "put": table,
            "version": image.version,
            "left": len(messages) - index - 1,
        }, [*arrays]


def packed_message(header: Header, arrays: Sequence[Array]) -> list[Array]:
    """A header and arrays as one row of arrays; ``read_message`` is the way back."""
    return [np.frombuffer(json.dumps(header).encode(), np.uint8), *arrays]


def read_message(row: Sequence[Array]) -> tuple[Header, Sequence[Array]]:
    """The header and the arrays of a ``packed_message``."""
    header: Header = json.loads(row[0].tobytes())
    return header, row[1:]
