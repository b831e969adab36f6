"""The manifest of a checkpoint: the variables with their tasks, and a checksum of every file."""

import json
import os
import stat
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etils import epath

from runtime import DataLossError, InvalidArgumentError
from runtime.lowlevel import ArraySlice, CheckpointFile, canonical_dtype, durability, storage

FILE_NAME = "bellwether.json"
"""Name of the manifest in a step's directory, which plain Orbax ignores."""
FORMAT = 1
UNCHECKED = ("_CHECKPOINT_METADATA", "commit_success.txt", FILE_NAME)
"""Files that Orbax writes after the manifest, and the manifest itself, which has its own checksum."""

_LATEST_UNIX_TIME = 1e11
"""Bound of the time of a save: ``datetime`` cannot show years of five digits."""
_NAMES = 3
"""Largest number of names in a message."""


@dataclass(frozen=True)
class StoredArray:
    """A whole array in a checkpoint.

    Attributes:
        name: name of the array; nested trees of other programs give ``outer/inner``.
        key: path in the store.
        dtype: name of the dtype in numpy or ml_dtypes, or "string".
        shape: shape of the array.
        encoded: bytes of a string array on disk; 0 for other dtypes.
        slices: (task, offset, shape) of each part of the array; empty if unknown.
    """

    name: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    encoded: int = 0
    slices: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()

    @property
    def stored(self) -> ArraySlice:
        """The array in its form on disk."""
        if self.dtype == "string":
            return ArraySlice.of_bytes(self.key, self.encoded)
        return ArraySlice.whole(self.key, self.shape, canonical_dtype(self.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of the elements; for strings, bytes on disk."""
        return self.stored.nbytes


@dataclass(frozen=True)
class CheckpointManifest:
    """The description of a checkpoint without its arrays.

    Attributes:
        step: global step in the checkpoint's name.
        sequence: number in the order of saves of this directory, one more than that of the save
            before.
        epoch: epoch of the chief that saved.
        saved_at: time of the save, Unix time in seconds.
        variables: arrays by name.
        files: every file of the arrays with size and checksum, relative to the step's directory.
        states: by task, the named states of the trainer (``harness.checkpointable``).
        snapshot: random number by which tasks remember the saved values; 0 in checkpoints of
            earlier versions.
        with_nan: names of the variables with a NaN. Earlier versions did not look for NaN.
    """

    step: int
    sequence: int
    epoch: int
    saved_at: float
    variables: Mapping[str, StoredArray]
    files: Sequence[CheckpointFile] = ()
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    snapshot: int = 0
    with_nan: Sequence[str] = ()

    def __post_init__(self) -> None:
        assert self.variables.keys() >= set(self.with_nan)

    @property
    def nan_text(self) -> str:
        """The first names of ``with_nan``, for a message."""
        more = len(self.with_nan) - _NAMES
        return ", ".join(self.with_nan[:_NAMES]) + (f" and {more} more" if more > 0 else "")

    def to_json(self) -> str:
        """Returns the manifest as text, with a checksum of its own.

        Raises:
            InvalidArgumentError: The manifest is too large to be read again.
        """
        body = {
            "format": FORMAT,
            "step": self.step,
            "sequence": self.sequence,
            "epoch": self.epoch,
            "saved_at": self.saved_at,
            "variables": {
                name: {
                    "dtype": v.dtype,
                    "shape": list(v.shape),
                    "slices": [
                        [task, list(offset), list(shape)] for task, offset, shape in v.slices
                    ],
                    "encoded": v.encoded,
                }
                for name, v in sorted(self.variables.items())
            },
            "files": [[f.path, f.size, f.crc32] for f in self.files],
            "states": {task: dict(states) for task, states in self.states.items()},
            "cut": self.snapshot,
            **({"with_nan": list(self.with_nan)} if self.with_nan else {}),
        }
        # Sorted, so that every reader computes the same checksum.
        text = json.dumps(body, sort_keys=True)
        whole = (
            json.dumps(
                {"crc32": zlib.crc32(text.encode()), "manifest": body}, sort_keys=True, indent=1
            )
            + "\n"
        )
        if not durability.is_small(whole.encode()):
            raise InvalidArgumentError(
                f"the manifest of step {self.step} is too large to be read again ({len(whole)} "
                "bytes): keep the "
                "states of harness.checkpointable smaller, and large ones in variables"
            )
        return whole

    @classmethod
    def from_json(cls, text: str, where: str) -> "CheckpointManifest":
        """Returns the manifest of text that ``to_json`` wrote.

        Args:
            text: the text.
            where: name of the checkpoint, for errors.

        Raises:
            DataLossError: The text is damaged, or of a newer format.
        """
        try:
            outer = json.loads(text)
            body = outer["manifest"]
            # The checksum is of the values, so the text may be indented otherwise.
            crc = zlib.crc32(json.dumps(body, sort_keys=True).encode())
            if crc != outer["crc32"]:
                raise DataLossError(f"{where} is damaged: its manifest has a wrong checksum")
            # After the checksum, as a damaged number is no newer format.
            if body["format"] > FORMAT:
                raise DataLossError(
                    f"{where} has format {body['format']}; this version reads up to {FORMAT}"
                )
            files = [CheckpointFile(*f) for f in body["files"]]
            # A path with .. would have files outside the checkpoint read.
            for file in files:
                if not durability.is_inside(file.path):
                    raise DataLossError(
                        f"{where} is damaged: its manifest names the file {file.path!r}, which "
                        "does not lie in it"
                    )
            found = cls(
                step=body["step"],
                sequence=body["sequence"],
                epoch=body["epoch"],
                saved_at=body["saved_at"],
                variables={
                    name: StoredArray(
                        name,
                        name,
                        v["dtype"],
                        tuple(v["shape"]),
                        v["encoded"],
                        tuple((t, tuple(o), tuple(s)) for t, o, s in v["slices"]),
                    )
                    for name, v in body["variables"].items()
                },
                files=files,
                states=body["states"],
                snapshot=body.get("cut", 0),
                with_nan=tuple(
                    name for name in body.get("with_nan", ()) if name in body["variables"]
                ),
            )
            found._check_values()
            return found
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, DataLossError):
                raise
            raise DataLossError(
                f"{where} is damaged: its manifest cannot be read ({error})"
            ) from error

    def _check_values(self) -> None:
        """Raises ValueError for values that are JSON but that no save writes."""
        arrays = self.variables.values()
        texts = [
            text
            for array in arrays
            for text in (array.name, array.dtype, *(task for task, _, _ in array.slices))
        ]
        for text in (*texts, *(file.path for file in self.files)):
            # Printed, other characters could move the cursor of a terminal.
            if not isinstance(text, str) or not text.isprintable():
                raise ValueError(f"the name {text!r}")
        parts = [
            part
            for array in arrays
            for _, offset, shape in array.slices
            for part in (offset, shape)
        ]
        sizes = [number for part in (*parts, *(array.shape for array in arrays)) for number in part]
        numbers = (
            self.step,
            self.sequence,
            self.epoch,
            self.snapshot,
            *sizes,
            *(file.size for file in self.files),
        )
        if not all(isinstance(number, int) for number in numbers):
            raise ValueError("a number of it is none")
        if not 0 <= self.saved_at < _LATEST_UNIX_TIME:
            raise ValueError(f"the time {self.saved_at!r}")


def read_manifest(step_directory: str) -> CheckpointManifest | None:
    """Returns the manifest of a checkpoint, or None if another program wrote the checkpoint.

    Raises:
        DataLossError: The manifest is damaged.
        UnavailableError, PermissionDeniedError: The manifest cannot be read now, or may not be
            read.
    """
    try:
        path = str(epath.Path(step_directory) / FILE_NAME)
        text = (
            durability.small_text(path) if storage.is_local(path) else epath.Path(path).read_text()
        )
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        durability.raise_if_barred(error, step_directory)
        raise DataLossError(
            f"{step_directory} is damaged: its manifest cannot be read ({error})"
        ) from error
    return CheckpointManifest.from_json(text, step_directory)


def quick_problems(step_directory: str, manifest: CheckpointManifest) -> list[str]:
    """Returns a line for each file that is missing or has a wrong size; raises as ``wrong_files``."""

    def look(path: str, file: CheckpointFile) -> str:
        found = os.stat(path)
        # A pipe would hold the reader up for ever.
        if not stat.S_ISREG(found.st_mode):
            return "is not a regular file"
        return "" if found.st_size == file.size else f"{found.st_size} bytes instead of {file.size}"

    if "://" in step_directory:
        # Each size costs a request there. Tensorstore checks the chunks that it reads.
        return []
    return _find_problems(step_directory, manifest.files, look)


def wrong_files(step_directory: str, files: Sequence[CheckpointFile]) -> list[str]:
    """Returns a line for each file of a local checkpoint that differs from its checksum.

    All files are read as a whole.

    Raises:
        UnavailableError, PermissionDeniedError: A file cannot be read now, or may not be read. The
            file may be undamaged.
    """

    def look(path: str, file: CheckpointFile) -> str:
        return (
            ""
            if durability.is_as_saved(path, file.size, file.crc32)
            else "it does not match its checksum"
        )

    return _find_problems(step_directory, files, look)


def _find_problems(
    step_directory: str, files: Sequence[CheckpointFile], look: Callable[[str, CheckpointFile], str]
) -> list[str]:
    problems = []
    for file in files:
        path = os.path.join(step_directory, file.path)
        try:
            problem = look(path, file)
        except OSError as error:
            durability.raise_if_barred(error, path)
            problem = str(error.strerror)
        if problem:
            problems.append(f"{file.path}: {problem}")
    return problems


def all_problems(step_directory: str, manifest: CheckpointManifest) -> list[str]:
    """Returns a line for each damaged file; reads the files unless their sizes show damage.

    Raises:
        UnavailableError, PermissionDeniedError: as ``wrong_files``.
    """
    if not storage.is_local(step_directory):
        # Each file is a download there. Tensorstore checks the chunks that it reads.
        return []
    return quick_problems(step_directory, manifest) or wrong_files(step_directory, manifest.files)
