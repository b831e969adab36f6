"""Readers of files whose names come from a queue, and files as they are: on the host of the client."""

from __future__ import annotations

import glob
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

import runtime as rt
from harness.tf1.inputs.queues import FIFOQueue, PaddingFIFOQueue, RandomShuffleQueue
from harness.tf1.inputs.records import compression, open_file, records
from harness.tf1.ops.lift import Public, constant
from harness.tf1.ops.python_ops import host_op, host_ops, strings
from runtime import concurrency
from runtime.lowlevel import Array, python_call

public = Public("tf", "Files and their readers")

Records = Iterator[tuple[str, bytes]]
"""What a file gives: records, each with its key."""


class _Session(Protocol):
    def run(self, fetches: object) -> bytes: ...


class _State:
    """The place of a session's reader in its files."""

    def __init__(self) -> None:
        self.lock = concurrency.Lock()
        self.records: Records | None = None
        self.produced = self.completed = 0


def _one(queue: FIFOQueue | RandomShuffleQueue | PaddingFIFOQueue) -> rt.Tensor:
    """Takes the next name from a queue."""
    found: rt.Tensor | list[rt.Tensor] = queue.dequeue()
    if isinstance(found, list) or not found.dtype.hasobject:
        raise TypeError(f"{queue.name!r} must hold the names of files, one string each")
    return found


class ReaderBase:
    """Reads one file after the other; their names come from a queue. Each session reads for itself.

    Args:
        open_file: the records of a file.
        kind: TensorFlow's type of the operation.
        name: of the reader.
    """

    def __init__(self, open_file: Callable[[str], Records], kind: str, name: str | None) -> None:
        self._open = open_file
        self._name = rt.get_default_graph().unique_name(name or kind).rsplit("/", 1)[-1]
        self._states: weakref.WeakKeyDictionary[object, _State] = weakref.WeakKeyDictionary()
        self._lock = concurrency.Lock()

    @property
    def supports_serialize(self) -> bool:
        """False: the state cannot be saved."""
        return False

    def _state(self, session: object) -> _State:
        with self._lock:
            return self._states.setdefault(session, _State())

    def _next(self, state: _State, session: _Session, filename: rt.Tensor) -> tuple[str, bytes]:
        """Reads the next record, of the next file where one has ended.

        The caller holds the state's lock.
        """
        while True:
            if state.records is None:
                state.records = self._open(session.run(filename).decode())
            found = next(state.records, None)
            if found is not None:
                state.produced += 1
                return found
            state.records = None
            state.completed += 1

    def read(
        self, queue: FIFOQueue | RandomShuffleQueue | PaddingFIFOQueue, name: str | None = None
    ) -> tuple[rt.Tensor, rt.Tensor]:
        """Returns the key and the value of the next record, both strings.

        Args:
            queue: of names of files; waited for when a file has ended.
            name: operation name.

        Raises:
            OutOfRangeError: in the step, the queue is closed and empty.
            DataLossError: in the step, a file is damaged.
        """
        filename = _one(queue)

        def read(session: _Session, _: Sequence[Array]) -> Sequence[object]:
            state = self._state(session)
            with state.lock:
                key, value = self._next(state, session, filename)
            return [strings([key]).reshape(()), strings([value]).reshape(())]

        label = name or f"{self._name}/Read"
        op = python_call(read, [], [((), object), ((), object)], name=label, type="ReaderRead")
        return op.outputs[0], op.outputs[1]

    def read_up_to(
        self,
        queue: FIFOQueue | RandomShuffleQueue | PaddingFIFOQueue,
        num_records: int,
        name: str | None = None,
    ) -> tuple[rt.Tensor, rt.Tensor]:
        """Returns the keys and values of the next records of one file, at most ``num_records``."""
        filename = _one(queue)

        def read(session: _Session, _: Sequence[Array]) -> Sequence[object]:
            state = self._state(session)
            with state.lock:
                found = [self._next(state, session, filename)]
                while len(found) < num_records and state.records is not None:
                    more = next(state.records, None)
                    if more is None:
                        break
                    state.produced += 1
                    found.append(more)
            return [strings([key for key, _ in found]), strings([value for _, value in found])]

        label = name or f"{self._name}/ReadUpTo"
        op = python_call(
            read, [], [((None,), object), ((None,), object)], name=label, type="ReaderReadUpTo"
        )
        return op.outputs[0], op.outputs[1]

    def num_records_produced(self, name: str | None = None) -> rt.Tensor:
        """Returns the number of records that were read, int64."""
        return self._count("num_records_produced", lambda state: state.produced, name)

    def num_work_units_completed(self, name: str | None = None) -> rt.Tensor:
        """Returns the number of files that were read to their ends, int64."""
        return self._count("num_work_units_completed", lambda state: state.completed, name)

    def _count(self, what: str, count: Callable[[_State], int], name: str | None) -> rt.Tensor:
        def counted(session: object, _: Sequence[Array]) -> Sequence[object]:
            return [np.int64(count(self._state(session)))]

        return python_call(counted, [], [((), np.int64)], name=name or what, type=what).outputs[0]

    def reset(self, name: str | None = None) -> rt.Operation:
        """Returns an operation that forgets the file that is being read, and the counts."""

        def forget(session: object, _: Sequence[Array]) -> Sequence[object]:
            with self._lock:
                self._states.pop(session, None)
            return []

        return python_call(forget, [], [], name=name or f"{self._name}/Reset", type="ReaderReset")


def lines(path: str, kind: str = "") -> Iterator[bytes]:
    """Yields the lines of a file without their ends."""
    with open_file(path, kind) as file:
        rest = b""
        while block := file.read(1 << 16):
            *whole, rest = (rest + block).split(b"\n")
            yield from (line.removesuffix(b"\r") for line in whole)
        if rest:
            yield rest.removesuffix(b"\r")


def fixed_length(
    path: str, record: int, header: int = 0, footer: int = 0, hop: int = 0, kind: str = ""
) -> Records:
    """Yields records of one size from a file, with file and number; see ``FixedLengthRecordReader``."""
    with open_file(path, kind) as file:
        data = file.read()
    places = range(header, len(data) - footer - record + 1, hop or record)
    return ((f"{path}:{i}", data[at : at + record]) for i, at in enumerate(places))


@public.add()
class TFRecordReader(ReaderBase):
    """Reads files of records in TensorFlow's format.

    Args:
        name: of the reader.
        options: such as the compression.
    """

    def __init__(self, name: str | None = None, options: object = None) -> None:
        kind = compression(options)  # type: ignore[arg-type]
        super().__init__(
            lambda path: ((f"{path}:{at}", record) for at, record in records(path, kind)),
            "TFRecordReader",
            name,
        )


@public.add()
class TextLineReader(ReaderBase):
    """Reads lines of text.

    Args:
        skip_header_lines: how many at the beginning of each file are left out.
        name: of the reader.
    """

    def __init__(self, skip_header_lines: int | None = None, name: str | None = None) -> None:
        def read(path: str) -> Records:
            for number, line in enumerate(lines(path), 1):
                if number > (skip_header_lines or 0):
                    yield f"{path}:{number}", line

        super().__init__(read, "TextLineReader", name)


@public.add()
class WholeFileReader(ReaderBase):
    """A reader that takes each file for a record, with the file name as the key."""

    def __init__(self, name: str | None = None) -> None:
        def read(path: str) -> Records:
            with open_file(path) as file:
                yield path, file.read()

        super().__init__(read, "WholeFileReader", name)


@public.add()
class IdentityReader(ReaderBase):
    """Gives the names from the queue, as keys and as values."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(lambda path: iter([(path, path.encode())]), "IdentityReader", name)


@public.add()
class FixedLengthRecordReader(ReaderBase):
    """Reads records of one size.

    Args:
        record_bytes: size of a record.
        header_bytes: left out at the beginning of each file.
        footer_bytes: left out at its end.
        hop_bytes: from the beginning of one record to that of the next; ``record_bytes`` by
            default.
        name: of the reader.
        encoding: "ZLIB" or "GZIP".
    """

    def __init__(
        self,
        record_bytes: int,
        header_bytes: int | None = None,
        footer_bytes: int | None = None,
        hop_bytes: int | None = None,
        name: str | None = None,
        encoding: str | None = None,
    ) -> None:
        sizes = (record_bytes, header_bytes or 0, footer_bytes or 0, hop_bytes or 0)
        kind = compression(encoding)
        super().__init__(
            lambda path: fixed_length(path, *sizes, kind), "FixedLengthRecordReader", name
        )


@public.add()
def read_file(filename: rt.TensorLike, name: str | None = None) -> rt.Tensor:
    """Reads the content of a file, a string.

    Raises NotFoundError, in the step, when there is no such file.
    """

    def read(path: Array) -> object:
        with open_file(path.item().decode()) as file:
            return file.read()

    return host_op(read, [filename], (), object, name, "ReadFile")


@public.add()
def write_file(
    filename: rt.TensorLike, contents: rt.TensorLike, name: str | None = None
) -> rt.Operation:
    """Returns an operation that writes a string to a file, and makes the directories above it."""

    def write(_: object, given: Sequence[Array]) -> Sequence[object]:
        path = given[0].item().decode()
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "wb") as file:
            file.write(given[1].item())
        return []

    return python_call(write, [filename, contents], [], name=name or "WriteFile", type="WriteFile")


@public.add()
def matching_files(pattern: rt.TensorLike, name: str | None = None) -> rt.Tensor:
    """Returns the names of the files that match a pattern, sorted, as they are in the step."""

    def match(patterns: Array) -> list[object]:
        return [strings(sorted({path for p in patterns.ravel() for path in glob.glob(p.decode())}))]

    return host_ops(match, [pattern], [((None,), object)], name, "MatchingFiles")[0]


def match_filenames_once(pattern: str | Sequence[str], name: str | None = None) -> rt.Tensor:
    """Returns the names of the files that match a pattern, sorted, as they are when the graph is built.

    Raises:
        InvalidArgumentError: there are none.
    """
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    found = sorted({path for each in patterns for path in glob.glob(each)})
    if not found:
        raise rt.InvalidArgumentError(
            f"match_filenames_once: no file matches {', '.join(patterns)}"
        )
    names: rt.Tensor = constant(found, name=name or "matching_filenames")
    return names
