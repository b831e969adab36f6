"""Arrays on disk: zarr arrays in an OCDBT key-value store, written and read with tensorstore as Orbax does.

Tensorstore is imported when the first array is written or read: a task that never does either starts without it.
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
"""Arrays are committed in groups of about so many bytes ..."""
GROUPS_IN_FLIGHT = 2
"""... of which so many are under way at once."""
CORES_PER_WRITER = 4
"""One thread writes files for every so many cores: more would slow down training, not speed up the disk."""
READERS = 16
READS_IN_FLIGHT = 4
"""How many arrays are read at once."""
CHUNK_TIMES = 4
CHUNK_BYTES = 64 << 20
"""A chunk may be so many times as large as its array, or so many bytes: others write arrays in chunks of one size."""
_MANIFEST_MAGIC = bytes.fromhex("0cdb3a2a")
_NODE_MAGIC = bytes.fromhex("0cdb20de")
_MANIFEST_BYTES = 1 << 20
"""A longer manifest is none of ours."""
_HEAD_BYTES = 14
"""Magic number, length, version, and how the rest is compressed."""
METADATA_BYTES = 16 << 20
"""The most that a file may have that says what an array is, or where a store's values lie."""
ALIGNMENT = 64
"""XLA takes an array of host memory that begins at a multiple of so many bytes as it is, without a copy."""
MANIFEST_FILE = "bellwether.json"
"""What is in every checkpoint of ours, with the checksums of its files."""
_STORE_FILE = "manifest.ocdbt"
"""What is in every OCDBT store, and only there."""
_ARRAY_FILES = (".zarray", "zarr.json")
"""One of these is in every zarr array that lies in files of its own."""
_PACKED = "{} is packed, so no task reads it: Saver(transfer='stream') reads it and sends the values"
_TS_THREADS = "ts_pool_worker"
"""What tensorstore's threads are called."""


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
    """Whether a path is of a mounted file system, not ``gs://`` or ``s3://``."""
    return "://" not in path


def absolute(path: str) -> str:
    """A path that means the same to a task that was started in another directory; links stay as they are.

    Where a link leads may differ from host to host.
    """
    return os.path.abspath(path) if is_local(path) else path


def _base(path: str) -> Any:
    """The key-value store under a directory."""
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
        # Data files need no rename each; the manifest does.
        spec.update(base={**base, "file_io_locking": {"mode": "non_atomic"}}, manifest=base)
    if write:
        spec.update(
            config={
                "max_inline_value_bytes": 1024,
                "max_decoded_node_bytes": 100_000_000,
                "manifest_kind": "single",
                "compression": None,  # so nothing in the store is larger than on disk, and tasks read it
            },
            assume_config=True,  # nobody else writes into this store
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
    """Writes arrays into the OCDBT store in ``directory``; nothing is copied on the way.

    Args:
        directory: where; made when it is not there.
        arrays: the arrays, none of which may change until this ends.
        group_bytes: arrays are committed in groups of about so many bytes ...
        in_flight: ... of which so many are under way while the next one is made.
        pace: when to rest between groups.
        with_nan: is given the keys of the arrays in which there is a NaN.

    Yields:
        The bytes of each group that is on disk. Who asks for no more ends the writing.

    Raises:
        DiskFullError: the disk is full.
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
        files: path below the directory's parent, size in bytes and CRC-32 of each; none where there is no file system.
        with_nan: the keys of the arrays in which there is a NaN.
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
    """Writes arrays as ``write_arrays`` does, so that they survive a power cut.

    Args:
        directory: where; made when it is not there.
        arrays: as in ``write_arrays``.
        cancelled: asked after each group; when true, writing ends.
        wrote: told the number of bytes of each group that is on disk.
        group_bytes: as in ``write_arrays``.
        in_flight: as in ``write_arrays``.
        pace: as in ``write_arrays``.

    Returns:
        What has been written.
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
                sums.advance()  # while the next arrays are on their way to the disk
    if not local:
        return WrittenStore([], sorted(with_nan))
    sync_tree(directory, files=False)  # tensorstore has synced the files
    name = os.path.basename(directory)
    files = [(f"{name}/{path}", size, crc) for path, (size, crc) in sums.finish().items()]
    return WrittenStore(files, sorted(with_nan))


def has_nan(array: Array) -> bool:
    """Whether a number in an array is NaN; a model whose variables have such numbers has diverged."""
    import jax.numpy as jnp  # who only reads starts without it

    return bool(jnp.issubdtype(array.dtype, np.inexact)) and bool(np.isnan(array).any())


def merge(directory: str, parts: Iterable[str]) -> None:
    """Makes one OCDBT store of several below it. The values stay in the files where they are.

    Args:
        directory: of the whole store.
        parts: names of the sub-directories that are stores; no two have the same key.

    Raises:
        DiskFullError: the disk is full.
        DataLossError: a part cannot be read, or the whole not be written.
    """
    import tensorstore as ts

    context = _context(ts)

    def opened(path: str, write: bool) -> Any:
        return ts.KvStore.open(_kvstore(path, None, ocdbt=True, write=write), context=context)

    try:
        whole = opened(directory, True).result()
        transaction = ts.Transaction(atomic=True)
        target = whole.with_transaction(transaction)
        for store in [opened(f"{directory.rstrip('/')}/{name}", False) for name in parts]:
            store.result().experimental_copy_range_to(target).result()
        transaction.commit_async().result()
    except (ValueError, OSError) as error:
        raise write_error(directory, error) from error


def has_arrays(path: str) -> bool:
    """Returns True if a local directory is an OCDBT store, as far as the names of its files tell."""
    return os.path.lexists(os.path.join(path, _STORE_FILE))


def is_store(directory: str) -> bool:
    """Whether a directory holds an OCDBT store that somebody has committed to.

    Raises:
        DataLossError: it cannot be looked into.
    """
    import tensorstore as ts

    try:
        found = ts.KvStore.open(_base(directory), context=_context(ts)).result().read(_STORE_FILE).result()
    except ValueError as error:
        raise DataLossError(f"{directory} cannot be looked into: {' '.join(str(error).split())[:300]}") from error
    return str(found.state) == "value"


def lacking(directory: str, arrays: Iterable[ArraySlice]) -> list[str]:
    """What an OCDBT store lacks of what it should hold, by its own index; no values are read.

    Args:
        directory: of the store.
        arrays: whole ones.

    Returns:
        One line for each array that is not there as a whole; empty when all are.
    """
    import tensorstore as ts

    context = _context(ts)
    try:
        keys = ts.KvStore.open(_kvstore(directory, None, ocdbt=True), context=context).result().list().result()
    except ValueError as error:
        return [f"no array can be found: {one_line(error)}"]
    chunks = Counter(key.decode().rpartition("/")[0] for key in keys if not key.endswith(b"/.zarray"))
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
        if size >= limit:  # now, and not only when the next item is there
            yield group
            group, size = [], 0
    if group:
        yield group


def _blocks(placed: ArraySlice, array: Array, limit: int) -> Iterator[tuple[ArraySlice, Array]]:
    """An array, in blocks when it is larger than a group: else writing it could not rest in the middle."""
    if array.nbytes <= limit:
        yield placed, array
        return
    array = np.asarray(array)  # a view: slices of a jax array are copies
    for block in placed.blocks(limit):
        yield block, array[block.region(placed.offset)]


def write_error(directory: str, error: Exception) -> OpError:
    """What an error of the system, or of tensorstore, says of a write: the disk is full, or something else."""
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
    """Raises DataLossError where the files that say what an array is are none: tensorstore reads them whole.

    It ends the process where there is no memory for that.
    """
    if not is_local(directory):
        return
    names = [os.path.join(directory, _STORE_FILE)] if ocdbt else [os.path.join(directory, key, n) for n in _ARRAY_FILES]
    for name in names:
        try:
            about = os.stat(name)
        except OSError:  # who reads it tells
            continue
        if not stat.S_ISREG(about.st_mode) or about.st_size > METADATA_BYTES:
            raise DataLossError(
                f"{name} is damaged: it is not a regular file, or larger than the metadata of arrays is"
            )


def _is_plain(directory: str) -> bool:
    """Whether nothing of a local OCDBT store's index is compressed: its manifest, and the one node that it has.

    The format: https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format
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
        return True  # who reads it tells
    except (IndexError, UnicodeDecodeError):
        return False


def _is_plain_head(head: bytes, magic: bytes) -> bool:
    """Whether what begins so says that it is of the format's one version, and not compressed."""
    return len(head) >= _HEAD_BYTES and head[:4] == magic and head[12:14] == bytes(2)


def _plain_root(manifest: bytes) -> tuple[str, int] | None:
    """The file and the place of the newest version's root in a manifest, None where that or more may be compressed.

    Raises:
        IndexError, UnicodeDecodeError: it is none.
    """
    if not _is_plain_head(manifest, _MANIFEST_MAGIC):
        return None
    at = _HEAD_BYTES + 16  # the store's id

    def number() -> int:
        """The next one, in seven bits of each byte."""
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

    kind, _, _ = numbers(3)  # and two limits
    at += 1  # the arity of the tree of versions
    if kind or number():  # several manifests, or a compressed index
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
    numbers(versions)  # their generations
    heights = manifest[at : at + versions]
    at += versions
    path, offset = paths[numbers(versions)[-1]], numbers(versions)[-1]
    return None if heights[-1] else (path, offset)


def _is_packed(store: Any) -> bool:
    """Whether the chunks of an array may unpack to more than they are on disk."""
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
    """An array that is there as it is wanted; raises InvalidArgumentError where its shape or dtype is another."""
    store = _open_for_reading(ts, context, directory, placed.key, ocdbt, zarr3)
    shape = tuple(store.shape)
    if shape != placed.full_shape:
        raise InvalidArgumentError(f"{placed.key!r} in {directory} has shape {shape}, not {placed.full_shape}")
    if store.dtype.name != placed.dtype.name:
        raise InvalidArgumentError(f"{placed.key!r} in {directory} is {store.dtype.name}, not {placed.dtype.name}")
    return store


def _check_chunks(store: Any, directory: str, key: str) -> None:
    """Raises DataLossError where one chunk, which is in memory as a whole when it is read, dwarfs its array."""
    chunk = store.chunk_layout.read_chunk.shape or ()
    itemsize = store.dtype.numpy_dtype.itemsize
    size, whole = math.prod(chunk) * itemsize, math.prod(store.shape) * itemsize
    if size > max(CHUNK_TIMES * whole, CHUNK_BYTES):
        raise DataLossError(
            f"{key!r} in {directory} is damaged: each of its chunks is {size} bytes, the whole array {whole}"
        )


def describe(directory: str, key: str, *, ocdbt: bool, zarr3: bool) -> ArraySlice:
    """An array as it lies on disk, in the parts in which it is read; arguments and errors as in ``read_arrays``."""
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
    """Reads blocks of arrays, each no more of the file than it needs, and gives one after the other.

    The arrays are aligned for XLA, which takes them as they are.

    Args:
        directory: of the store.
        wanted: what to read; ``shape`` and ``dtype`` are compared with the file.
        ocdbt: whether the arrays lie in an OCDBT store, or in files of their own.
        zarr3: whether they are of zarr's third version.
        only_plain: refuse what is packed. Tensorstore unpacks an index, or a chunk, as a whole, and ends the process
            where there is no memory for that.
        mapped: map files into memory instead of copying them twice. A file that the disk cannot give kills the process
            then, so it is for files that have just been read as a whole.
        cancelled: asked before each array; when true, reading ends.
        at_once: how many are being read at a time.

    Raises:
        DataLossError: an array is damaged or a part of it is missing; names it.
        NotFoundError: an array is not there.
        InvalidArgumentError: it has another shape or dtype.
        FailedPreconditionError: it is packed, and only plain ones are wanted.
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
    """All that ``read_each`` gives; arguments and errors are the same."""
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
