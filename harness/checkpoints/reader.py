"""Reading checkpoints without a session: names, shapes, dtypes and values, also of plain Orbax's checkpoints."""

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from typing import Any

from etils import epath

from harness.checkpoints import layout
from harness.checkpoints.manifest import (
    CheckpointManifest,
    StoredArray,
    all_problems,
    read_manifest,
)
from runtime import DataLossError, NotFoundError
from runtime.lowlevel import Array, dtype_name, durability, storage, string_arrays

TIMES = 64
BYTES = 64 << 20
"""Limits of the size of a checkpoint's files: ``TIMES`` the bytes of the arrays, plus ``BYTES``.

Files may be larger than arrays, because a chunk has an entry in an index, and may be a single
number.
"""


class CheckpointReader:
    """An opened checkpoint, of which values are read on request; the first request calls ``verify``.

    Args:
        path: directory of one checkpoint; ``load_checkpoint`` takes looser names.

    Attributes:
        path: directory of the checkpoint.
        manifest: the manifest; None if another program wrote the checkpoint.
        arrays: arrays by name.
        source: store of the arrays.

    Raises:
        DataLossError: The checkpoint is damaged.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        item = layout.find_item(path)
        self.manifest: CheckpointManifest | None = read_manifest(path)
        if self.manifest is None and layout.is_ours(path):
            raise DataLossError(f"{path} is damaged: its manifest is missing")
        tree = self._read_tree(item)
        self.source = storage.Source(
            item,
            layout.path_exists(epath.Path(item) / storage.STORE_FILE),
            bool(tree.get("use_zarr3")),
        )
        manifest = self.manifest
        found = list(manifest.variables.values() if manifest else self._foreign_arrays(tree))
        self.arrays = {s.name: s for s in sorted(found, key=lambda s: s.name)}
        if (self.manifest is not None or self.source.ocdbt) and storage.is_local(item):
            _check_size(item, sum(s.nbytes for s in found))

    def _read_tree(self, item: str) -> dict[str, Any]:
        try:
            tree: dict[str, Any] = json.loads(
                layout.text_of(epath.Path(item) / layout.ORBAX_TREE_FILE)
            )
            return tree
        except (OSError, ValueError, RecursionError) as error:
            durability.raise_if_barred(error, item)
            raise DataLossError(
                f"{self.path} is damaged: {layout.ORBAX_TREE_FILE} cannot be read ({error})"
            ) from error

    def _foreign_arrays(self, tree: dict[str, Any]) -> Iterator[StoredArray]:
        # Some nodes of the tree have no array: Orbax keeps empty nodes and texts in the tree
        # itself.
        paths = [
            [str(k["key"]) for k in entry["key_metadata"]]
            for entry in tree["tree_metadata"].values()
            if not entry["value_metadata"].get("skip_deserialize")
            and entry["value_metadata"].get("value_type") not in ("None", "string", "Dict", "List")
        ]
        for path in paths:
            key = ".".join(path)
            stored = storage.describe(self.source, key)
            yield StoredArray("/".join(path), key, dtype_name(stored.dtype), stored.shape)

    def get_variable_to_shape_map(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each array by name."""
        return {n: s.shape for n, s in self.arrays.items()}

    @functools.cached_property
    def problems(self) -> list[str]:
        """A line for each damaged file; the files are read once. See ``verify``."""
        return [] if self.manifest is None else all_problems(self.path, self.manifest)

    def verify(self) -> None:
        """Compares all files with the checksums in the manifest, once.

        A checkpoint of another program has no manifest, so nothing is compared. Neither are files
        in an object store.

        Raises:
            DataLossError: Files are damaged; the message names the files.
            UnavailableError, PermissionDeniedError: Files cannot be read now, or may not be read.
        """
        if self.problems:
            raise DataLossError(
                f"checkpoint {self.path} is damaged: {'; '.join(self.problems[:5])}"
            )

    def get_tensor(self, name: str) -> Array:
        """Returns the whole value of an array.

        Raises:
            NotFoundError: There is no array of this name.
            DataLossError: The checkpoint is damaged, perhaps in a file of another array; see
                ``verify``.
        """
        # TF1 programs name the output of a variable.
        stored = self.arrays.get(name.removesuffix(":0"))
        if stored is None:
            raise NotFoundError(
                f"Key {name} not found in checkpoint {self.path}; it has {', '.join(self.arrays)}"
            )
        self.verify()
        (array,) = storage.read_each(self.source, [stored.stored])
        return (
            string_arrays.decode_strings(array, stored.shape) if stored.dtype == "string" else array
        )


def _check_size(item: str, nbytes: int) -> None:
    """Raises DataLossError if files are much larger than their arrays: sparse files cost no disk."""
    total = 0
    for where, _, names in os.walk(item):
        for name in names:
            # The reader of the file reports the error.
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(where, name)).st_size
    if total > TIMES * nbytes + BYTES:
        raise DataLossError(
            f"{item} is damaged: its files are {total} bytes, and its arrays {nbytes}"
        )


def load_checkpoint(ckpt_dir_or_file: str) -> CheckpointReader:
    """Opens a checkpoint for reading.

        weights = harness.load_checkpoint("logdir").get_tensor("mlp/w1")

    Args:
        ckpt_dir_or_file: a checkpoint (``logdir/model.ckpt/123`` or ``logdir/model.ckpt-123``) or a
            directory of checkpoints, of which the newest is opened. Directories that plain Orbax
            saved into count too.

    Raises:
        ValueError: There is no checkpoint.
        DataLossError: The checkpoint is damaged.
    """
    while True:
        path = path_of(ckpt_dir_or_file)
        try:
            return CheckpointReader(path)
        except (OSError, DataLossError):
            # A step that was deleted at this moment has a newer successor, which the next round
            # finds.
            if layout.path_exists(epath.Path(path)):
                raise


def path_of(ckpt_dir_or_file: str) -> str:
    """Returns the path of the checkpoint that ``load_checkpoint`` opens; raises the same errors."""
    path = layout.find_checkpoint(str(ckpt_dir_or_file))
    if path is None:
        raise ValueError(f"Couldn't find a checkpoint at {ckpt_dir_or_file}")
    return path


def list_variables(ckpt_dir_or_file: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns (name, shape) of every array in a checkpoint, sorted; see ``load_checkpoint``."""
    return sorted(load_checkpoint(ckpt_dir_or_file).get_variable_to_shape_map().items())


def load_variable(ckpt_dir_or_file: str, name: str) -> Array:
    """Returns the value of an array of a checkpoint.

        weights = harness.load_variable("logdir", "mlp/w1")

    Args:
        ckpt_dir_or_file: as for ``load_checkpoint``, with the same errors.
        name: name of the array, as for ``CheckpointReader.get_tensor``.
    """
    return load_checkpoint(ckpt_dir_or_file).get_tensor(name)
