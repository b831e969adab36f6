"""Arrays on disk: zarr arrays in an OCDBT key-value store, written and read with tensorstore as Orbax does.

Tasks write and read their own arrays here. The chief merges the stores of the tasks, and streams
arrays. Tensorstore is imported with the first array, so that a task without checkpoints starts
faster.
"""

from __future__ import annotations

import math
import os
import stat
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from runtime import concurrency
from runtime.checkpoint.array_slice import ArraySlice
from runtime.checkpoint.durability import (
    barred_in,
    checksum,
    files_below,
    sync_tree,
)
from runtime.checkpoint.pacing import Pace, step_aside
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

if TYPE_CHECKING:
    import tensorstore

GROUP_BYTES = 64 << 20
"""Bytes of the groups in which arrays are committed, about."""
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
STORE_FILE = "manifest.ocdbt"
"""File of every OCDBT store, and of nothing else."""
_ARRAY_FILES = (".zarray", "zarr.json")
"""Metadata files, of which a zarr array in files of its own has one."""
_PACKED = (
    "{} is packed, so no task reads it: Saver(transfer='stream') reads it and sends the values"
)
_TS_THREADS = "ts_pool_worker"
"""Name of tensorstore's threads in the operating system."""
_Spec = dict[str, Any]
"""A description for tensorstore, as JSON can say it."""


def _never_cancelled() -> bool:
    return False


def _context(*, threads: int = READERS) -> tensorstore.Context:
    import tensorstore as ts

    return ts.Context(
        {
            "cache_pool#ocdbt": {"total_bytes_limit": 100_000_000},
            "file_io_concurrency": {"limit": threads},
        }
    )


def is_local(path: str) -> bool:
    """Returns True for a path of a mounted file system, not ``gs://`` or ``s3://``."""
    return "://" not in path


def absolute(path: str) -> str:
    """Returns an absolute path, which tasks of another working directory can use.

    Links stay as they are, because a link may lead elsewhere on another host.
    """
    return os.path.abspath(path) if is_local(path) else path


def _base_spec(path: str) -> _Spec | str:
    """Returns tensorstore's spec of the files below a directory."""
    path = path.rstrip("/") + "/"
    return {"driver": "file", "path": path} if is_local(path) else path


def _kvstore_spec(
    directory: str, key: str | None, *, ocdbt: bool, write: bool = False
) -> _Spec | str:
    base = _base_spec(directory)
    if not ocdbt:
        if isinstance(base, str):
            return base + (key or "")
        return {**base, "path": base["path"] + (f"{key}/" if key else "")}
    spec: _Spec = {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#ocdbt"}
    if isinstance(base, dict):
        # Data files have unique names and are written once. Only the manifest needs the atomic
        # rename.
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


@dataclass(frozen=True)
class CheckpointFile:
    """A file of a checkpoint.

    Attributes:
        path: path relative to the directory that was written.
        size: size in bytes.
        crc32: CRC-32 of the content.
    """

    path: str
    size: int
    crc32: int


@dataclass(frozen=True)
class WrittenArrays:
    """Arrays that were written.

    Attributes:
        files: all files, with checksums; empty for an object store.
        with_nan: keys of the arrays with a NaN.
    """

    files: list[CheckpointFile]
    with_nan: frozenset[str]


def write_store(
    directory: str,
    arrays: Iterable[tuple[ArraySlice, Array]],
    *,
    cancelled: Callable[[], bool] = _never_cancelled,
    group_bytes: int = GROUP_BYTES,
    pace: Pace | None = None,
) -> WrittenArrays:
    """Writes an OCDBT store that survives a power cut, without a copy of the arrays, and sums its files.

    Args:
        directory: directory of the store; created if needed.
        arrays: places and values. No array may change until the function returns.
        cancelled: called before each group; True ends the writing.
        group_bytes: bytes of a group that is committed at once, about.
        pace: decides the rests between groups; None never rests.

    Returns:
        The files of the store and the keys with a NaN.

    Raises:
        DiskFullError: The disk is full.
        DataLossError: The store cannot be written.

    Examples:
        >>> import tempfile
        >>> whole = replace(ArraySlice.whole("w", (3,), np.dtype("float32")), chunk=(3,))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     written = write_store(f"{directory}/store", [(whole, np.ones(3, "float32"))])
        ...     read = list(read_each(Source(f"{directory}/store"), [whole]))
        >>> sorted(written.with_nan), read
        ([], [array([1., 1., 1.], dtype=float32)])
    """
    with_nan: set[str] = set()
    writer = _StoreWriter(directory)
    since = concurrency.monotonic()
    try:
        for group in _group_arrays(arrays, group_bytes):
            # A rest while the last group is written would be no rest for the disk.
            if writer.is_writing and pace is not None and pace.others_work():
                writer.finish()
                pace.rest(concurrency.monotonic() - since)
            if cancelled():
                break
            since = concurrency.monotonic()
            writer.write(group)
            with_nan |= {
                placed.key
                for placed, array in group
                if placed.key not in with_nan and has_nan(array)
            }
        writer.finish()
    except OpError:
        # The arrays may come from another task, whose error says what happened there.
        raise
    except (ValueError, OSError) as error:
        raise write_error(directory, error) from error
    finally:
        writer.close()
    if not is_local(directory):
        return WrittenArrays([], frozenset(with_nan))
    # Tensorstore has synced the files, and no directory.
    sync_tree(directory, files=False)
    name = os.path.basename(directory)
    files = [
        CheckpointFile(f"{name}/{path}", *checksum(os.path.join(directory, path)))
        for path in files_below(directory)
    ]
    return WrittenArrays(files, frozenset(with_nan))


class _StoreWriter:
    """The groups of one store on their way to the disk.

    Args:
        directory: directory of the store.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._context = _context(
            threads=max(1, min(READERS, (os.cpu_count() or 1) // CORES_PER_WRITER))
        )
        self._begun: set[str] = set()
        # The commit of the group before, which reaches the disk while the next group begins.
        self._commit: tensorstore.Future[None] | None = None

    @property
    def is_writing(self) -> bool:
        """True if a group may still be on its way."""
        return self._commit is not None

    def write(self, group: Sequence[tuple[ArraySlice, Array]]) -> None:
        """Copies a group of arrays, and begins the commit of the group when the commit before has ended."""
        import tensorstore as ts

        step_aside(_TS_THREADS)
        # All arrays of a group are committed together, so that the store gets few files.
        transaction = ts.Transaction()
        # All are opened at once: each one that is new writes metadata.
        opened = [self._open_array(placed, transaction) for placed, _ in group]
        for (placed, array), opening in zip(group, opened, strict=True):
            _write_array(opening.result(), placed, array)
        # One commit at most is on its way while the next group begins.
        self.finish()
        self._commit = transaction.commit_async()

    def finish(self) -> None:
        """Waits until the last group is on the disk."""
        if self._commit is not None:
            self._commit.result()

    def close(self) -> None:
        """Waits without an error, as a caller that cleans up must meet no writer."""
        if self._commit is not None:
            self._commit.exception()

    def _open_array(
        self, placed: ArraySlice, transaction: tensorstore.Transaction
    ) -> tensorstore.Future[tensorstore.TensorStore]:
        import tensorstore as ts

        # Only the first block of an array writes the metadata.
        first = placed.key not in self._begun
        self._begun.add(placed.key)
        spec = {
            **_array_spec(_kvstore_spec(self._directory, placed.key, ocdbt=True, write=True)),
            "dtype": placed.dtype.name,
            "store_data_equal_to_fill_value": True,
            "metadata": {"shape": placed.full_shape, "chunks": placed.chunk, "compressor": None},
        }
        context = self._context
        return ts.open(
            spec,
            open=True,
            create=first,
            assume_metadata=not first,
            context=context,
            transaction=transaction,
        )


def _write_array(store: tensorstore.TensorStore, placed: ArraySlice, array: Array) -> None:
    if not math.prod(placed.full_shape):
        # Orbax takes an array without any chunk for one that was lost on the way.
        store.kvstore[".".join("0" for _ in placed.full_shape)] = b""  # type: ignore[index]
    if array.size:
        target = store[placed.region()] if placed.shape else store
        target.write(array, can_reference_source_data_indefinitely=True).copy.result()


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

    context = _context()

    def opened(path: str, write: bool) -> tensorstore.Future[tensorstore.KvStore]:
        return ts.KvStore.open(_kvstore_spec(path, None, ocdbt=True, write=write), context=context)

    try:
        whole = opened(directory, True).result()
        # The merged store has all parts or none, whenever the process dies.
        transaction = ts.Transaction(atomic=True)
        target = whole.with_transaction(transaction)
        # All parts are opened before the first is copied, so that the openings run at the same
        # time.
        for store in [opened(f"{directory.rstrip('/')}/{name}", False) for name in parts]:
            store.result().experimental_copy_range_to(target).result()
        transaction.commit_async().result()
    except (ValueError, OSError) as error:
        raise write_error(directory, error) from error


def is_store(directory: str) -> bool:
    """Returns True if a directory holds an OCDBT store with a commit.

    Raises:
        DataLossError: The directory cannot be read.
    """
    import tensorstore as ts

    try:
        found = (
            ts.KvStore.open(_base_spec(directory), context=_context())
            .result()
            .read(STORE_FILE)
            .result()
        )
    except ValueError as error:
        raise DataLossError(
            f"{directory} cannot be looked into: {' '.join(str(error).split())[:300]}"
        ) from error
    return str(found.state) == "value"


def lacking(directory: str, arrays: Iterable[ArraySlice]) -> list[str]:
    """Returns a line for each array that an OCDBT store does not hold as a whole.

    The index of the store tells. No values are read.

    Args:
        directory: directory of the store.
        arrays: whole arrays that the store should hold.
    """
    import tensorstore as ts

    context = _context()
    try:
        # Every chunk is a key, so the index tells a missing chunk without a read of values.
        keys = (
            ts.KvStore.open(_kvstore_spec(directory, None, ocdbt=True), context=context)
            .result()
            .list()
            .result()
        )
    except ValueError as error:
        return [f"no array can be found: {one_line(error)}"]
    chunks = Counter(
        key.decode().rpartition("/")[0] for key in keys if not key.endswith(b"/.zarray")
    )
    # All arrays are opened at the same time: each needs only metadata, but waits for the disk.
    found = [
        (a.key, a.shape, a.dtype.name, Source(directory).opened(context, a.key)) for a in arrays
    ]
    problems = []
    for key, shape, dtype, opening in found:
        try:
            store = opening.result()
        except ValueError as error:
            problems.append(f"{key!r} cannot be opened: {one_line(error)}")
            continue
        if (tuple(store.shape), store.dtype.name) != (shape, dtype):
            problems.append(
                f"{key!r} is {store.dtype.name}{list(store.shape)} instead of {dtype}{list(shape)}"
            )
            continue
        counts = [
            -(-size // part) for size, part in zip(store.shape, _chunk_of(store), strict=True)
        ]
        wanted = max(1, math.prod(counts))
        if chunks[key] != wanted:
            problems.append(f"{key!r} has {chunks[key]} chunks instead of {wanted}")
    return problems


def _group_arrays(
    arrays: Iterable[tuple[ArraySlice, Array]], limit: int
) -> Iterator[list[tuple[ArraySlice, Array]]]:
    group: list[tuple[ArraySlice, Array]] = []
    size = 0
    for item in (block for placed, array in arrays for block in _cut_blocks(placed, array, limit)):
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


def _cut_blocks(placed: ArraySlice, array: Array, limit: int) -> Iterator[tuple[ArraySlice, Array]]:
    """Yields an array, cut into blocks if it is larger than a group, so that writing can rest in between."""
    if array.nbytes <= limit:
        yield placed, array
        return
    # Slices of a JAX array are copies, and slices of this view are not.
    array = np.asarray(array)
    left = array.nbytes
    for block in placed.blocks(limit):
        yield block, array[block.region(placed.offset)]
        left -= block.nbytes
    assert not left, "the blocks are not the whole array"


def write_error(directory: str, error: Exception) -> OpError:
    """Returns DiskFullError or DataLossError for a write error of the system or tensorstore."""
    text = " ".join(str(error).split())
    for reason in (
        "No space left on device",
        "Disk quota exceeded",
        "File too large",
        "RESOURCE_EXHAUSTED",
    ):
        if reason in text:
            return DiskFullError(f"the disk of {directory} is full: {reason}")
    return DataLossError(f"writing into {directory}: {text[:400]}")


def _array_spec(kvstore: _Spec | str, *, zarr3: bool = False) -> _Spec:
    return {
        "driver": "zarr3" if zarr3 else "zarr",
        "kvstore": kvstore,
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }


class Source(NamedTuple):
    """A store of arrays to read.

    Attributes:
        directory: directory of the store.
        ocdbt: True if the arrays lie in an OCDBT store, False if in files of their own.
        zarr3: True for the third version of zarr.
    """

    directory: str
    ocdbt: bool = True
    zarr3: bool = False

    def opened(
        self, context: tensorstore.Context, key: str
    ) -> tensorstore.Future[tensorstore.TensorStore]:
        """Begins to open an array; returns tensorstore's future."""
        import tensorstore as ts

        kvstore = _kvstore_spec(self.directory, key, ocdbt=self.ocdbt)
        spec = {**_array_spec(kvstore, zarr3=self.zarr3), "fill_missing_data_reads": False}
        return ts.open(spec, open=True, read=True, context=context)


def _check_metadata(source: Source, key: str) -> None:
    """Raises DataLossError if a metadata file is not a regular file or too large.

    Tensorstore reads such a file as a whole, and ends the process if there is no memory for that.
    """
    # An object store has no devices or pipes.
    if not is_local(source.directory):
        return
    for name in [STORE_FILE] if source.ocdbt else [os.path.join(key, n) for n in _ARRAY_FILES]:
        name = os.path.join(source.directory, name)
        try:
            about = os.stat(name)
        except OSError:
            # Tensorstore reports the error when it reads the file.
            continue
        if not stat.S_ISREG(about.st_mode) or about.st_size > METADATA_BYTES:
            raise DataLossError(
                f"{name} is damaged: it is not a regular file, or larger than the metadata of "
                "arrays is"
            )


def is_plain(directory: str) -> bool:
    """Returns True if a local OCDBT store's manifest and its only node are not compressed.

    The format is specified at
    https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format
    """
    try:
        with open(
            os.open(os.path.join(directory, STORE_FILE), os.O_RDONLY | os.O_NONBLOCK), "rb"
        ) as file:
            root = plain_root(file.read(_MANIFEST_BYTES))
        if root is None:
            return False
        path, offset = root
        # A manifest may name any file, and must not lead out of the store.
        if os.path.isabs(path) or ".." in path.split("/"):
            return False
        with open(
            os.open(os.path.join(directory, path), os.O_RDONLY | os.O_NONBLOCK), "rb"
        ) as file:
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


def plain_root(manifest: bytes) -> tuple[str, int] | None:
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

    # The configuration: the kind of manifest, two limits, the arity of the version tree, the kind
    # of compression.
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


def _is_packed(store: tensorstore.TensorStore) -> bool:
    """Returns True if chunks of an array may unpack to more than their size on disk."""
    about = store.spec().to_json()["metadata"]
    # The third version of zarr lists codecs, and the second has a compressor and filters.
    if "codecs" in about:
        return any(codec["name"] != "bytes" for codec in about["codecs"])
    return about.get("compressor") is not None or bool(about.get("filters"))


def _open_for_reading(
    context: tensorstore.Context, source: Source, key: str
) -> tensorstore.TensorStore:
    directory = source.directory
    _check_metadata(source, key)
    try:
        store = source.opened(context, key).result()
    except ValueError as error:
        text = one_line(error)
        # Tensorstore raises ValueError for all errors, and only the text tells them apart.
        if "NOT_FOUND" in text:
            raise NotFoundError(f"Key {key} not found in checkpoint {directory}") from error
        if (other := barred_in(text, directory)) is not None:
            raise other from error
        raise DataLossError(f"{key!r} in {directory} cannot be opened: {text}") from error
    _check_chunks(store, directory, key)
    return store


def _open_wanted(
    context: tensorstore.Context, source: Source, placed: ArraySlice
) -> tensorstore.TensorStore:
    """Opens an array; raises InvalidArgumentError for another shape or dtype than wanted."""
    directory = source.directory
    store = _open_for_reading(context, source, placed.key)
    shape = tuple(store.shape)
    if shape != placed.full_shape:
        raise InvalidArgumentError(
            f"{placed.key!r} in {directory} has shape {shape}, not {placed.full_shape}"
        )
    if store.dtype.name != placed.dtype.name:
        raise InvalidArgumentError(
            f"{placed.key!r} in {directory} is {store.dtype.name}, not {placed.dtype.name}"
        )
    return store


def _chunk_of(store: tensorstore.TensorStore) -> tuple[int, ...]:
    """Returns the shape of a chunk."""
    return tuple(part or 1 for part in store.chunk_layout.read_chunk.shape or store.shape)


def _check_chunks(store: tensorstore.TensorStore, directory: str, key: str) -> None:
    """Raises DataLossError if a chunk is much larger than its array: a read needs a whole chunk in memory."""
    itemsize = store.dtype.numpy_dtype.itemsize
    size, whole = math.prod(_chunk_of(store)) * itemsize, math.prod(store.shape) * itemsize
    if size > max(CHUNK_TIMES * whole, CHUNK_BYTES):
        raise DataLossError(
            f"{key!r} in {directory} is damaged: each of its chunks is {size} bytes, the whole "
            f"array {whole}"
        )


def describe(source: Source, key: str) -> ArraySlice:
    """Returns an array as it lies on disk, with its chunks; errors are those of ``read_each``."""
    store = _open_for_reading(_context(), source, key)
    whole = ArraySlice.whole(key, tuple(store.shape), store.dtype.numpy_dtype)
    return replace(whole, chunk=_chunk_of(store))


def read_each(
    source: Source,
    wanted: Iterable[ArraySlice],
    *,
    only_plain: bool = False,
    cancelled: Callable[[], bool] = _never_cancelled,
    at_once: int = READS_IN_FLIGHT,
) -> Iterator[Array]:
    """Reads blocks of arrays, and of each file only the chunks that a block needs.

    The arrays are aligned for XLA, which takes them without a copy.

    Args:
        source: the store.
        wanted: blocks to read; ``shape`` and ``dtype`` are compared with the file.
        only_plain: True refuses packed arrays. Tensorstore unpacks an index or a chunk as a whole,
            and ends the process if there is no memory for that.
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

    context = _context()
    directory = source.directory
    if only_plain and is_local(directory) and not (source.ocdbt and is_plain(directory)):
        raise FailedPreconditionError(_PACKED.format(directory))
    reads: deque[tuple[ArraySlice, Array, tensorstore.WriteFutures]] = deque()

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
        store = _open_wanted(context, source, placed)
        if only_plain and _is_packed(store):
            raise FailedPreconditionError(_PACKED.format(f"{placed.key!r} in {directory}"))
        try:
            # The size comes from a file, which may be damaged.
            array = aligned(placed.shape, placed.dtype)
        except MemoryError:
            raise ResourceExhaustedError(
                f"there is no memory for the {placed.nbytes} bytes of {placed.key!r}"
            ) from None
        target = ts.array(array, context=context, copy=False, write=True)
        reads.append(
            (placed, array, target.write(store[placed.region()] if placed.shape else store))
        )
        # The disk reads the next arrays while the caller places this one.
        if len(reads) >= at_once:
            yield finish()
    while reads:
        yield finish()
