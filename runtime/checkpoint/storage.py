"""Arrays on disk: zarr arrays in an OCDBT key-value store, written and read with tensorstore as Orbax does.

Tasks write and read their own arrays here. The chief merges the stores of the tasks, and streams arrays. Tensorstore is
imported with the first array, so that a task without checkpoints starts faster.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from runtime.checkpoint.array_slice import ArraySlice
from runtime.checkpoint.durability import (
    NOTHING_THERE,
    Checksums,
    barred,
    barred_in,
    checksum,
    files_below,
    is_as_saved,
    is_inside,
    is_small,
    raise_if_barred,
    small_text,
    sync,
    sync_tree,
)
from runtime.checkpoint.pacing import Pace, step_aside
from runtime.checkpoint.string_arrays import decode_strings, encode_strings
from runtime.errors import (
    DataLossError,
    DiskFullError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OpError,
    ResourceExhaustedError,
    one_line,
)
from runtime.tensor_spec import Array, aligned

GROUP_BYTES = 64 << 20
"""Bytes of the groups in which arrays are committed, about."""
GROUPS_IN_FLIGHT = 2
"""Number of groups that are under way at once."""
CORES_PER_WRITER = 4
"""Cores for each thread that writes files: more threads would slow training and not speed up the disk."""
READERS = 16
READS_IN_FLIGHT = 4
"""Number of arrays that are read at once."""
CHUNK_TIMES = 4
CHUNK_BYTES = 64 << 20
"""Limits of a chunk, in sizes of its array and in bytes, of which the larger counts.

Other programs write small arrays in chunks of a fixed size.
"""
_MANIFEST_MAGIC = bytes.fromhex("0cdb3a2a")
_NODE_MAGIC = bytes.fromhex("0cdb20de")
_MANIFEST_BYTES = 1 << 20
"""The longest manifest, in bytes, that a store of a Saver has."""
_HEAD_BYTES = 14
"""Bytes of the magic number, the length, the version, and the kind of compression."""
METADATA_BYTES = 16 << 20
"""The largest metadata file of an array or a store, in bytes."""
ALIGNMENT = 64
"""Bytes to whose multiples memory must be aligned, so that XLA takes an array without a copy."""
MANIFEST_FILE = "bellwether.json"
"""File with checksums in every checkpoint of a Saver."""
_STORE_FILE = "manifest.ocdbt"
"""File of every OCDBT store, and of nothing else."""
_ARRAY_FILES = (".zarray", "zarr.json")
"""Metadata files, of which a zarr array in files of its own has one."""
_PACKED = "{} is packed, so no task reads it: Saver(transfer='stream') reads it and sends the values"
_TS_THREADS = "ts_pool_worker"
"""Name of tensorstore's threads in the operating system."""


def _never() -> bool:
    return False


def _context(ts: Any, *, threads: int = READERS, mapped: bool = False) -> Any:
    context: dict[str, Any] = {
        "cache_pool#ocdbt": {"total_bytes_limit": 100_000_000},
        "file_io_concurrency": {"limit": threads},
    }
    if mapped:
        context["file_io_mode"] = {"mode": "memmap"}
    return ts.Context(context)


def is_local(path: str) -> bool:
    """Returns True for a path of a mounted file system, not ``gs://`` or ``s3://``."""
    return "://" not in path


def absolute(path: str) -> str:
    """Returns an absolute path, which tasks of another working directory can use.

    Links stay as they are, because a link may lead elsewhere on another host.
    """
    return os.path.abspath(path) if is_local(path) else path


def _base(path: str) -> Any:
    """Returns tensorstore's spec of the files below a directory."""
    path = path.rstrip("/") + "/"
    return {"driver": "file", "path": path} if is_local(path) else path


def _kvstore(directory: str, key: str | None, *, ocdbt: bool, write: bool = False) -> Any:
    base = _base(directory)
    if not ocdbt:
        if isinstance(base, str):
            return base + (key or "")
        return {**base, "path": base["path"] + (f"{key}/" if key else "")}
    spec: dict[str, Any] = {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#ocdbt"}
    if isinstance(base, dict):
        # Data files have unique names and are written once. Only the manifest needs the atomic rename.
        spec.update(base={**base, "file_io_locking": {"mode": "non_atomic"}}, manifest=base)
    if write:
        spec.update(
            config={
                "max_inline_value_bytes": 1024,
                "max_decoded_node_bytes": 100_000_000,
                "manifest_kind": "single",
                # A task reads only stores that unpack to no more than their size on disk.
                "compression": None,
            },
            # No other process writes into this store.
            assume_config=True,
            target_data_file_size=2**31 if isinstance(base, dict) else 400 << 20,
        )
    if key is not None:
        spec["path"] = key
    return spec


def write_arrays(
    directory: str,
    arrays: Iterable[tuple[ArraySlice, Array]],
    *,
    group_bytes: int = GROUP_BYTES,
    in_flight: int = GROUPS_IN_FLIGHT,
    pace: Pace | None = None,
    with_nan: set[str] | None = None,
) -> Generator[int, None, None]:
    """Writes arrays into an OCDBT store without a copy.

    Args:
        directory: directory of the store; created if needed.
        arrays: places and values. No array may change until the generator ends.
        group_bytes: bytes of a group that is committed at once, about.
        in_flight: number of groups under way while the next group begins.
        pace: decides the rests between groups; None never rests.
        with_nan: receives the keys of the arrays with a NaN.

    Yields:
        The bytes of each group that is on disk. Closing the generator ends the writing.

    Raises:
        DiskFullError: The disk is full.
        DataLossError: The store cannot be written.
    """
    writer = _GroupWriter(directory, set() if with_nan is None else with_nan)
    since = time.monotonic()
    try:
        for group in _groups(arrays, group_bytes):
            if writer.begun and pace is not None and pace.others_work():
                while writer.under_way:
                    yield writer.finish()
                pace.rest(time.monotonic() - since)
            since = time.monotonic()
            step_aside(_TS_THREADS)
            while len(writer.under_way) >= in_flight:
                yield writer.finish()
            writer.begin(group)
        while writer.under_way:
            yield writer.finish()
    except OpError:
        # The arrays may come from another task, whose error says what happened there.
        raise
    except (ValueError, OSError) as error:
        raise write_error(directory, error) from error
    finally:
        writer.abandon()


class _GroupWriter:
    """A writer of groups of arrays, several of which may be on their way to the disk.

    Args:
        directory: the OCDBT store.
        with_nan: receives the keys of the arrays in which there is a NaN.

    Attributes:
        begun: keys of the arrays of which a block was written.
        under_way: for each group whose commit has not been awaited, the commit and its bytes; the oldest first.
    """

    def __init__(self, directory: str, with_nan: set[str]) -> None:
        import tensorstore as ts

        self._ts = ts
        self._context = _context(ts, threads=max(1, min(READERS, (os.cpu_count() or 1) // CORES_PER_WRITER)))
        self._directory = directory
        self._with_nan = with_nan
        self.begun: set[str] = set()
        self.under_way: deque[tuple[Any, int]] = deque()

    def begin(self, group: Sequence[tuple[ArraySlice, Array]]) -> None:
        """Writes a group in a transaction and begins to commit it."""
        transaction = self._ts.Transaction()
        # All are opened at once: each one that is new writes metadata.
        opened = [self._open(placed, transaction) for placed, _ in group]
        for (placed, array), opening in zip(group, opened, strict=True):
            store = opening.result()
            if not math.prod(placed.full_shape):
                # Orbax takes an array without any chunk for one that was lost on the way.
                store.kvstore[".".join("0" for _ in placed.full_shape)] = b""
            if placed.key not in self._with_nan and has_nan(array):
                self._with_nan.add(placed.key)
            if array.size:
                target = store[placed.region()] if placed.shape else store
                target.write(array, can_reference_source_data_indefinitely=True).copy.result()
        self.under_way.append((transaction.commit_async(), sum(a.nbytes for _, a in group)))

    def _open(self, placed: ArraySlice, transaction: Any) -> Any:
        # Only the first block of an array writes the metadata.
        first = placed.key not in self.begun
        self.begun.add(placed.key)
        return self._ts.open(
            _write_spec(self._directory, placed),
            open=True,
            create=first,
            assume_metadata=not first,
            context=self._context,
            transaction=transaction,
        )

    def finish(self) -> int:
        """Waits until the oldest group is on disk; returns its bytes."""
        commit, size = self.under_way.popleft()
        commit.result()
        return size

    def abandon(self) -> None:
        """Waits for the groups under way, well or not: a caller that cleans up must meet no writer."""
        for commit, _ in self.under_way:
            commit.exception()


def _write_spec(directory: str, placed: ArraySlice) -> dict[str, Any]:
    return {
        "driver": "zarr",
        "dtype": placed.dtype.name,
        "kvstore": _kvstore(directory, placed.key, ocdbt=True, write=True),
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
        "store_data_equal_to_fill_value": True,
        "metadata": {"shape": placed.full_shape, "chunks": placed.chunk, "compressor": None},
    }


class WrittenStore(NamedTuple):
    """A store that was written.

    Attributes:
        files: path below the directory's parent, size in bytes and CRC-32 of each file; empty for an object store.
        with_nan: keys of the arrays with a NaN, sorted.
    """

    files: list[tuple[str, int, int]]
    with_nan: list[str]


def write_store(
    directory: str,
    arrays: Iterable[tuple[ArraySlice, Array]],
    *,
    cancelled: Callable[[], bool] = _never,
    wrote: Callable[[int], None] | None = None,
    group_bytes: int = GROUP_BYTES,
    in_flight: int = GROUPS_IN_FLIGHT,
    pace: Pace | None = None,
) -> WrittenStore:
    """Writes a store that survives a power cut, and sums its files.

    Args:
        directory: directory of the store; created if needed.
        arrays: as in ``write_arrays``.
        cancelled: called after each group; True ends the writing.
        wrote: called with the bytes of each group that is on disk.
        group_bytes: as in ``write_arrays``.
        in_flight: as in ``write_arrays``.
        pace: as in ``write_arrays``.

    Returns:
        The files of the store and the keys with a NaN.
    """
    with_nan: set[str] = set()
    local = is_local(directory)
    sums = Checksums(directory)
    writing = write_arrays(
        directory, arrays, group_bytes=group_bytes, in_flight=in_flight, pace=pace, with_nan=with_nan
    )
    with contextlib.closing(writing) as sizes:
        for size in sizes:
            if wrote is not None:
                wrote(size)
            if cancelled():
                break
            if local:
                # Finished files are summed while the next arrays are on their way to the disk.
                sums.advance()
    if not local:
        return WrittenStore([], sorted(with_nan))
    # Tensorstore has synced the files, and no directory.
    sync_tree(directory, files=False)
    name = os.path.basename(directory)
    files = [(f"{name}/{path}", size, crc) for path, (size, crc) in sums.finish().items()]
    return WrittenStore(files, sorted(with_nan))


def has_nan(array: Array) -> bool:
    """Returns True if an array has a NaN: such a model has diverged."""
    # A process that only reads checkpoints does not import JAX for this function.
    import jax.numpy as jnp

    return bool(jnp.issubdtype(array.dtype, np.inexact)) and bool(np.isnan(array).any())


def merge(directory: str, parts: Iterable[str]) -> None:
    """Makes one OCDBT store of several below its directory; values stay in their files.

    Args:
        directory: directory of the whole store.
        parts: names of the sub-directories with a store each. No two have a key in common.

    Raises:
        DiskFullError: The disk is full.
        DataLossError: A part cannot be read, or the whole store cannot be written.
    """
    import tensorstore as ts

    context = _context(ts)

    def opened(path: str, write: bool) -> Any:
        return ts.KvStore.open(_kvstore(path, None, ocdbt=True, write=write), context=context)

    try:
        whole = opened(directory, True).result()
        transaction = ts.Transaction(atomic=True)
        target = whole.with_transaction(transaction)
        # All parts are opened before the first is copied, so that the openings run at the same time.
        for store in [opened(f"{directory.rstrip('/')}/{name}", False) for name in parts]:
            store.result().experimental_copy_range_to(target).result()
        transaction.commit_async().result()
    except (ValueError, OSError) as error:
        raise write_error(directory, error) from error


def has_arrays(path: str) -> bool:
    """Returns True if a local directory has the file of an OCDBT store."""
    return os.path.lexists(os.path.join(path, _STORE_FILE))


def is_store(directory: str) -> bool:
    """Returns True if a directory holds an OCDBT store with a commit.

    Raises:
        DataLossError: The directory cannot be read.
    """
    import tensorstore as ts

    try:
        found = ts.KvStore.open(_base(directory), context=_context(ts)).result().read(_STORE_FILE).result()
    except ValueError as error:
        raise DataLossError(f"{directory} cannot be looked into: {' '.join(str(error).split())[:300]}") from error
    return str(found.state) == "value"


def lacking(directory: str, arrays: Iterable[ArraySlice]) -> list[str]:
    """Returns a line for each array that an OCDBT store does not hold as a whole.

    The index of the store tells. No values are read.

    Args:
        directory: directory of the store.
        arrays: whole arrays that the store should hold.
    """
    import tensorstore as ts

    context = _context(ts)
    try:
        keys = ts.KvStore.open(_kvstore(directory, None, ocdbt=True), context=context).result().list().result()
    except ValueError as error:
        return [f"no array can be found: {one_line(error)}"]
    chunks = Counter(key.decode().rpartition("/")[0] for key in keys if not key.endswith(b"/.zarray"))
    # All arrays are opened at the same time: each needs only metadata, but waits for the disk.
    found = [
        (
            a.key,
            a.shape,
            a.dtype.name,
            ts.open(_read_spec(directory, a.key, True, False), open=True, read=True, context=context),
        )
        for a in arrays
    ]
    problems = []
    for key, shape, dtype, opening in found:
        try:
            store: Any = opening.result()
        except ValueError as error:
            problems.append(f"{key!r} cannot be opened: {one_line(error)}")
            continue
        if (tuple(store.shape), store.dtype.name) != (shape, dtype):
            problems.append(f"{key!r} is {store.dtype.name}{list(store.shape)} instead of {dtype}{list(shape)}")
            continue
        chunk = store.chunk_layout.read_chunk.shape or store.shape
        wanted = max(1, math.prod(-(-size // part) for size, part in zip(store.shape, chunk, strict=True)))
        if chunks[key] != wanted:
            problems.append(f"{key!r} has {chunks[key]} chunks instead of {wanted}")
    return problems


def _groups(arrays: Iterable[tuple[ArraySlice, Array]], limit: int) -> Iterator[list[tuple[ArraySlice, Array]]]:
    group: list[tuple[ArraySlice, Array]] = []
    size = 0
    for item in (block for placed, array in arrays for block in _blocks(placed, array, limit)):
        if group and size + item[1].nbytes > limit:
            yield group
            group, size = [], 0
        group.append(item)
        size += item[1].nbytes
        # A full group goes at once: the next item may be long in coming from another task.
        if size >= limit:
            yield group
            group, size = [], 0
    if group:
        yield group


def _blocks(placed: ArraySlice, array: Array, limit: int) -> Iterator[tuple[ArraySlice, Array]]:
    """Yields an array, cut into blocks if it is larger than a group, so that writing can rest in between."""
    if array.nbytes <= limit:
        yield placed, array
        return
    # Slices of a JAX array are copies, and slices of this view are not.
    array = np.asarray(array)
    for block in placed.blocks(limit):
        yield block, array[block.region(placed.offset)]


def write_error(directory: str, error: Exception) -> OpError:
    """Returns DiskFullError or DataLossError for a write error of the system or tensorstore."""
    text = " ".join(str(error).split())
    for reason in ("No space left on device", "Disk quota exceeded", "File too large", "RESOURCE_EXHAUSTED"):
        if reason in text:
            return DiskFullError(f"the disk of {directory} is full: {reason}")
    return DataLossError(f"writing into {directory}: {text[:400]}")


def _read_spec(directory: str, key: str, ocdbt: bool, zarr3: bool) -> dict[str, Any]:
    return {
        "driver": "zarr3" if zarr3 else "zarr",
        "kvstore": _kvstore(directory, key, ocdbt=ocdbt),
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
        "fill_missing_data_reads": False,
    }


def _check_metadata(directory: str, key: str, *, ocdbt: bool) -> None:
    """Raises DataLossError if a metadata file is not a regular file or too large.

    Tensorstore reads such a file as a whole, and ends the process if there is no memory for that.
    """
    if not is_local(directory):
        return
    names = [os.path.join(directory, _STORE_FILE)] if ocdbt else [os.path.join(directory, key, n) for n in _ARRAY_FILES]
    for name in names:
        try:
            about = os.stat(name)
        except OSError:
            # Tensorstore reports the error when it reads the file.
            continue
        if not stat.S_ISREG(about.st_mode) or about.st_size > METADATA_BYTES:
            raise DataLossError(
                f"{name} is damaged: it is not a regular file, or larger than the metadata of arrays is"
            )


def _is_plain(directory: str) -> bool:
    """Returns True if a local OCDBT store's manifest and its only node are not compressed.

    The format is specified at https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format
    """
    try:
        with open(os.open(os.path.join(directory, _STORE_FILE), os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            root = _plain_root(file.read(_MANIFEST_BYTES))
        if root is None:
            return False
        path, offset = root
        if os.path.isabs(path) or ".." in path.split("/"):
            return False
        with open(os.open(os.path.join(directory, path), os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            file.seek(offset)
            return _is_plain_head(file.read(_HEAD_BYTES), _NODE_MAGIC)
    except OSError:
        # Tensorstore reports the error when it reads the file.
        return True
    except (IndexError, UnicodeDecodeError):
        return False


def _is_plain_head(head: bytes, magic: bytes) -> bool:
    """Returns True for the head of an uncompressed file of format version 0."""
    return len(head) >= _HEAD_BYTES and head[:4] == magic and head[12:14] == bytes(2)


def _plain_root(manifest: bytes) -> tuple[str, int] | None:
    """Returns the file and the offset of the newest version's root, or None if more may be compressed.

    Raises:
        IndexError, UnicodeDecodeError: The bytes are no manifest.
    """
    if not _is_plain_head(manifest, _MANIFEST_MAGIC):
        return None
    # The id of the store, 16 bytes, follows the head.
    at = _HEAD_BYTES + 16

    def number() -> int:
        """Reads the next number, which has seven bits in each byte."""
        nonlocal at
        value = shift = 0
        while shift < 64:
            byte = manifest[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
        raise IndexError("a number is longer than any is")

    def numbers(count: int) -> list[int]:
        return [number() for _ in range(count)]

    # The configuration: the kind of manifest, two limits, the arity of the version tree, the kind of compression.
    kind, _, _ = numbers(3)
    at += 1
    if kind or number():
        return None
    files = number()
    if not files:
        return None
    prefixes, suffixes, _ = [0, *numbers(files - 1)], numbers(files), numbers(files)
    paths, before = [], ""
    for prefix, suffix in zip(prefixes, suffixes, strict=True):
        before = before[:prefix] + manifest[at : at + suffix].decode("ascii")
        at += suffix
        paths.append(before)
    versions = number()
    # The generations of the versions are of no use here.
    numbers(versions)
    heights = manifest[at : at + versions]
    at += versions
    path, offset = paths[numbers(versions)[-1]], numbers(versions)[-1]
    return None if heights[-1] else (path, offset)


def _is_packed(store: Any) -> bool:
    """Returns True if chunks of an array may unpack to more than their size on disk."""
    about = store.spec().to_json()["metadata"]
    if "codecs" in about:
        return any(codec["name"] != "bytes" for codec in about["codecs"])
    return about.get("compressor") is not None or bool(about.get("filters"))


def _open_for_reading(ts: Any, context: Any, directory: str, key: str, ocdbt: bool, zarr3: bool) -> Any:
    _check_metadata(directory, key, ocdbt=ocdbt)
    try:
        store = ts.open(_read_spec(directory, key, ocdbt, zarr3), open=True, read=True, context=context).result()
    except ValueError as error:
        text = one_line(error)
        if "NOT_FOUND" in text:
            raise NotFoundError(f"Key {key} not found in checkpoint {directory}") from error
        if (other := barred_in(text, directory)) is not None:
            raise other from error
        raise DataLossError(f"{key!r} in {directory} cannot be opened: {text}") from error
    _check_chunks(store, directory, key)
    return store


def _open_wanted(ts: Any, context: Any, directory: str, placed: ArraySlice, ocdbt: bool, zarr3: bool) -> Any:
    """Opens an array; raises InvalidArgumentError for another shape or dtype than wanted."""
    store = _open_for_reading(ts, context, directory, placed.key, ocdbt, zarr3)
    shape = tuple(store.shape)
    if shape != placed.full_shape:
        raise InvalidArgumentError(f"{placed.key!r} in {directory} has shape {shape}, not {placed.full_shape}")
    if store.dtype.name != placed.dtype.name:
        raise InvalidArgumentError(f"{placed.key!r} in {directory} is {store.dtype.name}, not {placed.dtype.name}")
    return store


def _check_chunks(store: Any, directory: str, key: str) -> None:
    """Raises DataLossError if a chunk is much larger than its array: a read needs a whole chunk in memory."""
    chunk = store.chunk_layout.read_chunk.shape or ()
    itemsize = store.dtype.numpy_dtype.itemsize
    size, whole = math.prod(chunk) * itemsize, math.prod(store.shape) * itemsize
    if size > max(CHUNK_TIMES * whole, CHUNK_BYTES):
        raise DataLossError(
            f"{key!r} in {directory} is damaged: each of its chunks is {size} bytes, the whole array {whole}"
        )


def describe(directory: str, key: str, *, ocdbt: bool, zarr3: bool) -> ArraySlice:
    """Returns an array as it lies on disk, with its chunks; arguments and errors are those of ``read_arrays``."""
    import tensorstore as ts

    store = _open_for_reading(ts, _context(ts), directory, key, ocdbt, zarr3)
    whole = ArraySlice.whole(key, tuple(store.shape), store.dtype.numpy_dtype)
    return replace(whole, chunk=tuple(store.chunk_layout.read_chunk.shape or store.shape))


def read_each(
    directory: str,
    wanted: Iterable[ArraySlice],
    *,
    ocdbt: bool,
    zarr3: bool,
    only_plain: bool = False,
    mapped: bool = False,
    cancelled: Callable[[], bool] = _never,
    at_once: int = READS_IN_FLIGHT,
) -> Iterator[Array]:
    """Reads blocks of arrays, and of each file only the chunks that a block needs.

    The arrays are aligned for XLA, which takes them without a copy.

    Args:
        directory: directory of the store.
        wanted: blocks to read; ``shape`` and ``dtype`` are compared with the file.
        ocdbt: True if the arrays lie in an OCDBT store, False if in files of their own.
        zarr3: True for the third version of zarr.
        only_plain: True refuses packed arrays. Tensorstore unpacks an index or a chunk as a whole, and ends the process
            if there is no memory for that.
        mapped: True maps files into memory, which saves a copy. A read error of the disk then ends the process, so only
            files that were just read as a whole may be mapped.
        cancelled: called before each array; True ends the reading.
        at_once: number of arrays that are read at a time.

    Yields:
        The blocks, in the order of ``wanted``.

    Raises:
        DataLossError: An array is damaged or incomplete; the message names the array.
        NotFoundError: An array is missing.
        InvalidArgumentError: An array has another shape or dtype.
        FailedPreconditionError: An array is packed, and only plain arrays are wanted.
    """
    import tensorstore as ts

    context = _context(ts, mapped=mapped and is_local(directory))
    if only_plain and is_local(directory) and not (ocdbt and _is_plain(directory)):
        raise FailedPreconditionError(_PACKED.format(directory))
    reads: deque[tuple[ArraySlice, Array, Any]] = deque()

    def finish() -> Array:
        placed, array, future = reads.popleft()
        try:
            future.result()
        except ValueError as error:
            text = one_line(error)
            if (other := barred_in(text, directory)) is not None:
                raise other from error
            raise DataLossError(f"{placed.key!r} in {directory} is damaged: {text}") from error
        return array

    for placed in wanted:
        if cancelled():
            break
        store = _open_wanted(ts, context, directory, placed, ocdbt, zarr3)
        if only_plain and _is_packed(store):
            raise FailedPreconditionError(_PACKED.format(f"{placed.key!r} in {directory}"))
        try:
            array = aligned(placed.shape, placed.dtype)
        except MemoryError:
            raise ResourceExhaustedError(
                f"there is no memory for the {placed.nbytes} bytes of {placed.key!r}"
            ) from None
        target = ts.array(array, context=context, copy=False, write=True)
        reads.append((placed, array, target.write(store[placed.region()] if placed.shape else store)))
        if len(reads) >= at_once:
            yield finish()
    while reads:
        yield finish()


def read_arrays(directory: str, wanted: Sequence[ArraySlice], *, ocdbt: bool, zarr3: bool) -> list[Array]:
    """Reads blocks of arrays into a list; arguments and errors are those of ``read_each``."""
    return list(read_each(directory, wanted, ocdbt=ocdbt, zarr3=zarr3))


__all__ = [
    "MANIFEST_FILE",
    "NOTHING_THERE",
    "Checksums",
    "absolute",
    "barred",
    "checksum",
    "decode_strings",
    "describe",
    "encode_strings",
    "files_below",
    "has_arrays",
    "is_as_saved",
    "is_inside",
    "is_local",
    "is_small",
    "is_store",
    "lacking",
    "merge",
    "raise_if_barred",
    "read_arrays",
    "read_each",
    "small_text",
    "sync",
    "sync_tree",
    "write_arrays",
    "write_error",
    "write_store",
]
