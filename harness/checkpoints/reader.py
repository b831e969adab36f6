"""Reading checkpoints without a session: names, shapes, dtypes and values, of ours and of any that Orbax wrote."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from typing import Any

from etils import epath

from harness.checkpoints import layout
from harness.checkpoints.manifest import Manifest, StoredArray, all_problems, read_manifest
from runtime import DataLossError, NotFoundError
from runtime.lowlevel import Array, DType, canonical_dtype, dtype_name, storage

TIMES = 64
BYTES = 64 << 20
"""The files of a checkpoint may be so many times as large as its arrays, and so many bytes: a chunk has an entry in an
index, and may be a single number."""


class CheckpointReader:
    """An opened checkpoint. Values are read when they are asked for; the first calls ``verify``.

    Args:
        path: the directory of one checkpoint (see ``load_checkpoint`` for looser ways to name one).

    Attributes:
        path: that directory.
        item: the directory in it that holds the arrays.
        manifest: None when another program wrote the checkpoint.
        arrays: what it holds, by name.
        ocdbt: whether the arrays share one OCDBT store.
        zarr3: whether they are of zarr's third version.

    Raises:
        DataLossError: the checkpoint is damaged.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.item = layout.find_item(path)
        self.manifest: Manifest | None = read_manifest(path)
        if self.manifest is None and layout.is_ours(path):
            raise DataLossError(f"{path} is damaged: its manifest is missing")
        tree = self._tree()
        self.ocdbt = layout.exists(epath.Path(self.item) / layout.MERGED_STORE)
        self.zarr3 = bool(tree.get("use_zarr3"))
        if self.manifest is not None:
            found = list(self.manifest.variables.values())
        else:
            found = list(self._foreign(tree))
        self.arrays = {s.name: s for s in sorted(found, key=lambda s: s.name)}
        if (self.manifest is not None or self.ocdbt) and storage.is_local(self.item):
            _check_size(self.item, sum(s.nbytes for s in found))

    def _tree(self) -> dict[str, Any]:
        try:
            tree: dict[str, Any] = json.loads(layout.text_of(epath.Path(self.item) / layout.ORBAX_TREE_FILE))
            return tree
        except (OSError, ValueError, RecursionError) as error:
            storage.raise_if_barred(error, self.item)
            raise DataLossError(f"{self.path} is damaged: {layout.ORBAX_TREE_FILE} cannot be read ({error})") from error

    def _foreign(self, tree: dict[str, Any]) -> Iterator[StoredArray]:
        paths = [
            [str(k["key"]) for k in entry["key_metadata"]]
            for entry in tree["tree_metadata"].values()
            if not entry["value_metadata"].get("skip_deserialize")
            and entry["value_metadata"].get("value_type") not in ("None", "string", "Dict", "List")
        ]
        for path in paths:
            key = ".".join(path)
            stored = storage.describe(self.item, key, ocdbt=self.ocdbt, zarr3=self.zarr3)
            yield StoredArray("/".join(path), key, dtype_name(stored.dtype), stored.shape)

    def get_variable_to_shape_map(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape."""
        return {n: s.shape for n, s in self.arrays.items()}

    def get_variable_to_dtype_map(self) -> dict[str, DType]:
        """Name -> numpy dtype; ``object`` for strings."""
        return {n: canonical_dtype(s.dtype) for n, s in self.arrays.items()}

    def has_tensor(self, name: str) -> bool:
        """Whether there is an array of this name."""
        return _plain(name) in self.arrays

    @functools.cached_property
    def problems(self) -> list[str]:
        """The files that are not as they were saved, a line for each; looked for once. See ``verify``."""
        return [] if self.manifest is None else all_problems(self.path, self.manifest)

    def verify(self) -> None:
        """Compares the files with the checksums in the manifest, once: reads all of them, whatever is wanted of them.

        A checkpoint without a manifest, which another program wrote, has no checksums of whole files; neither is one
        compared that does not lie in a local directory.

        Raises:
            DataLossError: they are not as they were saved; names them.
            UnavailableError, PermissionDeniedError: they cannot be read now, or may not be.
        """
        if self.problems:
            raise DataLossError(f"checkpoint {self.path} is damaged: {'; '.join(self.problems[:5])}")

    def get_tensor(self, name: str) -> Array:
        """The value of one array, whole.

        Raises:
            NotFoundError: there is none of this name.
            DataLossError: the checkpoint is damaged, be it in a file of another array; see ``verify``.
        """
        stored = self.arrays.get(_plain(name))
        if stored is None:
            raise NotFoundError(f"Key {name} not found in checkpoint {self.path}; it has {', '.join(self.arrays)}")
        self.verify()
        array = storage.read_arrays(self.item, [stored.stored], ocdbt=self.ocdbt, zarr3=self.zarr3)[0]
        return storage.decode_strings(array, stored.shape) if stored.dtype == "string" else array

    def debug_string(self) -> str:
        """One line for each array: name, dtype and shape."""
        return "".join(f"{s.name} {s.dtype} {list(s.shape)}\n" for s in self.arrays.values())


def _check_size(item: str, nbytes: int) -> None:
    """Raises DataLossError where the files of a checkpoint dwarf its arrays: they have holes that cost no disk."""
    total = 0
    for where, _, names in os.walk(item):
        for name in names:
            with contextlib.suppress(OSError):  # who reads it tells
                total += os.stat(os.path.join(where, name)).st_size
    if total > TIMES * nbytes + BYTES:
        raise DataLossError(f"{item} is damaged: its files are {total} bytes, and its arrays {nbytes}")


def _plain(name: str) -> str:
    return name.removesuffix(":0")


def load_checkpoint(ckpt_dir_or_file: str) -> CheckpointReader:
    """Opens a checkpoint for reading.

    Args:
        ckpt_dir_or_file: a checkpoint (``logdir/model.ckpt/123`` or ``logdir/model.ckpt-123``) or a directory of
            checkpoints, of which the newest is taken; any directory that Orbax saved into works too.

    Raises:
        ValueError: there is no checkpoint.
        DataLossError: it is damaged.
    """
    while True:
        path = path_of(ckpt_dir_or_file)
        try:
            return CheckpointReader(path)
        except (OSError, DataLossError):
            if layout.exists(epath.Path(path)):
                raise
            # The step was deleted at this moment, so there is a newer one.


def path_of(ckpt_dir_or_file: str) -> str:
    """The path of the checkpoint that ``load_checkpoint`` opens, with its errors."""
    path = layout.find_checkpoint(str(ckpt_dir_or_file))
    if path is None:
        raise ValueError(f"Couldn't find a checkpoint at {ckpt_dir_or_file}")
    return path


def list_variables(ckpt_dir_or_file: str) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every array in a checkpoint, sorted; argument and errors as in ``load_checkpoint``."""
    return sorted(load_checkpoint(ckpt_dir_or_file).get_variable_to_shape_map().items())


def load_variable(ckpt_dir_or_file: str, name: str) -> Array:
    """The value of one array of a checkpoint; arguments and errors as in ``load_checkpoint`` and ``get_tensor``."""
    return load_checkpoint(ckpt_dir_or_file).get_tensor(name)
