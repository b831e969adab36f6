"""The holder of backups: a task keeps an image of a neighbour, so that the neighbour can continue after a death.

A task is described by entries: names, each with a few words (JSON) and some arrays. An *image* is
all entries as of one instant. The task, the *primary*, sends the changes since the last image. The
holder completes a new image from the changes, or keeps the image before: an image is whole or
absent. The holder does not know the meaning of entries.

A process that starts as a task draws a random process id. The primary is the last process that has
said hello or has taken up the image. The holder refuses messages of an earlier process of the task,
for example of a frozen process that was replaced, also the first message.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime import concurrency
from runtime.observe.audit import AuditLog
from runtime.tensor_spec import Array

CHUNK_BYTES = 64 << 20
"""Bytes of arrays after which a message ends and the next one begins."""

_PROCESSES_KEPT = 64
"""Most process ids that are remembered of a task."""

Json = Any
"""A JSON value."""
Header = dict[str, Json]
REFUSED_BASE, REFUSED_PROCESS = "base", "process_id"


@dataclass(frozen=True)
class BackupEntry:
    """A part of a task.

    Attributes:
        meta: a JSON value.
        arrays: constant numpy arrays.
    """

    meta: Json
    arrays: tuple[Array, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, without arrays of strings."""
        return sum(0 if a.dtype == object else a.nbytes for a in self.arrays)


@dataclass(frozen=True)
class BackupImage:
    """A task as of one instant.

    Attributes:
        version: number of the task's updates at that instant.
        about: facts of the primary for the process that requests the image.
        unusable_because: reason against a continuation from the image; empty if the task can
            continue.
        entries: the entries by name.
    """

    version: int
    about: Mapping[str, Json]
    unusable_because: str
    entries: Mapping[str, BackupEntry]

    @property
    def identity(self) -> tuple[int, int]:
        """The process that has sent the image, and the version there."""
        return self.about.get("process_id", 0), self.version


def chunks(
    entries: Mapping[str, BackupEntry], limit: int = CHUNK_BYTES
) -> list[dict[str, BackupEntry]]:
    """Splits entries into one or more messages of at most ``limit`` bytes, or of one larger entry.

    >>> entries = {name: BackupEntry(None, (np.zeros(3, np.uint8),)) for name in "abc"}
    >>> [list(message) for message in chunks(entries, limit=6)]
    [['a', 'b'], ['c']]
    """
    messages: list[dict[str, BackupEntry]] = [{}]
    size = 0
    for name, entry in entries.items():
        if messages[-1] and size + entry.nbytes > limit:
            messages.append({})
            size = 0
        messages[-1][name] = entry
        size += entry.nbytes
    assert sum(map(len, messages)) == len(entries), "an entry is lost, or comes twice"
    return messages


def packed(entries: Mapping[str, BackupEntry]) -> tuple[list[Json], list[Array]]:
    """Returns entries as a part of a header and a row of arrays; ``unpacked`` is the way back."""
    table = [[name, entry.meta, len(entry.arrays)] for name, entry in entries.items()]
    return table, [array for entry in entries.values() for array in entry.arrays]


def unpacked(
    table: Sequence[Json], arrays: Sequence[Array], *, copy: bool = True
) -> dict[str, BackupEntry]:
    """Returns the entries that ``packed`` packed.

    Args:
        table: the part of the header.
        arrays: the row of arrays.
        copy: True if the memory of the arrays will be used again.

    Examples:
        >>> unpacked(*packed({"w": BackupEntry({"device": None}, (np.zeros(2),))}))
        {'w': BackupEntry(meta={'device': None}, arrays=(array([0., 0.]),))}
    """
    rest = iter(arrays)
    found = {}
    for name, meta, count in table:
        taken = itertools.islice(rest, count)
        found[name] = BackupEntry(meta, tuple(np.array(a) if copy else a for a in taken))
    return found


class BackupHolder:
    """The images of neighbours, by name of the task. Thread safe.

    Memory: an image of each task, and the changes of an image on the way.

    Args:
        audit: log of the task that holds the images.
        check: raises PermissionDeniedError unless the caller is the task of a name.
    """

    def __init__(
        self, audit: AuditLog | None = None, check: Callable[[str], None] = lambda task: None
    ) -> None:
        self._audit = audit
        self._check = check
        self._lock = concurrency.Lock()
        self._images: dict[str, BackupImage] = {}
        # The image on the way, by task: the process id, the version and the entries so far.
        self._coming: dict[str, tuple[int, int, dict[str, BackupEntry]]] = {}
        self._process_ids: dict[str, list[int]] = {}
        """The known process ids, by task. The last id is the id of the primary."""

    def answer_message(self, message: Sequence[Array]) -> list[Array]:
        """Answers a message in the form of ``packed_message``."""
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
        # One line for each process, and not for each image.
        if first and header["hello"]:
            self._tell("backup.begin", header["of"], "ok")
        return self._push(header, arrays), []

    def _tell(self, action: str, task: str, outcome: str) -> None:
        if self._audit is not None:
            self._audit.write(action, peer="", what=task, outcome=outcome)

    def drop_all(self) -> None:
        """Forgets all images before a restore. New images come whole."""
        with self._lock:
            self._images.clear()
            self._coming.clear()

    def _push(self, header: Header, arrays: Sequence[Array]) -> Header:
        task, process_id, version, base = (
            header["of"],
            header["process_id"],
            header["version"],
            header["base"],
        )
        came = unpacked(header["put"], arrays)
        with self._lock:
            if self._was_replaced(task, process_id, header["hello"]):
                return {"refused": REFUSED_PROCESS}
            self._introduce(task, process_id)
            kept = self._images.get(task)
            before = kept if kept is not None and kept.identity == (process_id, base) else None
            # Changes cannot complete an image that is not here. The primary then sends a whole
            # image.
            if base is not None and before is None:
                return {"refused": REFUSED_BASE}
            if header["index"] == 0:
                self._coming[task] = (process_id, version, came)
            else:
                coming = self._coming.get(task)
                if coming is None or coming[:2] != (process_id, version):
                    return {"refused": REFUSED_BASE}
                coming[2].update(came)
            # More messages of this image follow.
            if "keep" not in header:
                return {}
            entries = self._coming.pop(task)[2]
            # Entries that have not changed come from the image before.
            if before is not None:
                entries = {**before.entries, **entries}
            whole = {name: entries[name] for name in header["keep"]}
            self._images[task] = BackupImage(
                version,
                {**header["about"], "process_id": process_id},
                header["unusable_because"],
                whole,
            )
            return {}

    def _was_replaced(self, task: str, process_id: int, hello: bool) -> bool:
        """Returns True for a thawed process, which would overwrite the image of the process in its place."""
        known = self._process_ids.get(task, [])
        return process_id in known[:-1] or (bool(known) and known[-1] != process_id and not hello)

    def _introduce(self, task: str, process_id: int) -> None:
        known = self._process_ids.setdefault(task, [])
        if process_id not in known:
            known.append(process_id)
            # A client that draws ids without end must not fill the memory.
            del known[:-_PROCESSES_KEPT]

    def _take(self, header: Header) -> tuple[Header, list[Array]]:
        task, index = header["of"], header["index"]
        with self._lock:
            if index == 0:
                # From now on earlier processes of the task are refused.
                self._introduce(task, header["process_id"])
            image = self._images.get(task)
        if image is None or image.unusable_because:
            return {
                "found": False,
                "why": image.unusable_because if image is not None else "it has none",
            }, []
        # The image is never changed, so each request cuts the same messages.
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
    """Returns a header and arrays as a row of arrays; ``read_message`` is the way back.

    Examples:
        >>> header, arrays = read_message(packed_message({"kind": "take"}, [np.zeros(2)]))
        >>> header, len(arrays)
        ({'kind': 'take'}, 1)
    """
    return [np.frombuffer(json.dumps(header).encode(), np.uint8), *arrays]


def read_message(row: Sequence[Array]) -> tuple[Header, Sequence[Array]]:
    """Returns the header and the arrays of a ``packed_message``."""
    header: Header = json.loads(row[0].tobytes())
    return header, row[1:]
