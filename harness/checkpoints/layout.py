"""The layout of checkpoints on disk: ``logdir/model.ckpt/123`` is step 123 of the series ``logdir/model.ckpt``.

A series is a plain Orbax CheckpointManager directory. TF1's spelling ``logdir/model.ckpt-123`` is
accepted as well. No file holds an absolute path, so a directory may be moved.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from absl import logging
from etils import epath

from harness import timeouts
from harness.checkpoints.manifest import (
    FILE_NAME,
    CheckpointManifest,
    quick_problems,
    read_manifest,
)
from runtime import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from runtime.lowlevel import DiskAwayError, durability, storage

ORBAX_STEP_FILE = "_CHECKPOINT_METADATA"
ORBAX_TREE_FILE = "_METADATA"
TEMPORARY = ".orbax-checkpoint-tmp"
DEFAULT_ITEM = "default"
STORE_OF_TASK = "ocdbt.process_"
"""Prefix of the stores of the tasks, of which the store of a checkpoint is made."""
REPLACED = "replaced"
"""Sub-directory of a series that keeps a step while the same step is saved again."""
RUN_FILE = "chief.lock"
"""The record of the run in its log directory.

The chief writes the record and holds the lock of the file.
"""
UNUSABLE = (DataLossError, NotFoundError, InvalidArgumentError, FileNotFoundError)
"""Errors of one checkpoint that is damaged, gone or of another model; an older one may do."""


@dataclass(frozen=True)
class StoredStep:
    """A finished checkpoint on disk.

    Attributes:
        number: the step.
        path: directory of the checkpoint; below ``replaced`` if a chief died while saving the same
            step again.
    """

    number: int
    path: str


def steps_in(directory: str) -> list[StoredStep]:
    """Returns the finished checkpoints of a series, whole or damaged, sorted by step.

    Raises:
        UnavailableError, PermissionDeniedError: as ``list_children``.
    """
    found: dict[int, StoredStep] = {}
    # A step of the series comes before one that was moved aside.
    for parent in (directory, str(epath.Path(directory) / REPLACED)):
        for child in list_children(parent):
            if child.name.isdigit() and int(child.name) not in found and is_checkpoint(child):
                found[int(child.name)] = StoredStep(int(child.name), str(child))
        if not storage.is_local(directory):
            # An object store has no rename, so no step is moved there.
            break
    return [found[number] for number in sorted(found)]


def list_children(directory: str) -> list[epath.Path]:
    """Returns the entries of a directory; empty only if the directory is empty or missing.

    Raises:
        UnavailableError: The directory cannot be read now.
        PermissionDeniedError: The directory may not be read.
    """
    root = epath.Path(directory)
    if not storage.is_local(directory):
        return list(root.iterdir()) if root.is_dir() else []
    try:
        return [root / name for name in os.listdir(directory)]
    except OSError as error:
        if error.errno in durability.NOTHING_THERE:
            return []
        raise _disk_error(error, directory) from None


def path_exists(path: epath.Path) -> bool:
    """Returns True if a file or directory exists; raises the errors of ``list_children``."""
    if not storage.is_local(str(path)):
        return bool(path.exists())
    # `os.path.exists` takes a directory that may not be read for a missing one.
    try:
        os.stat(path)
    except OSError as error:
        if error.errno in durability.NOTHING_THERE:
            return False
        raise _disk_error(error, str(path)) from None
    return True


def _disk_error(error: OSError, path: str) -> Exception:
    return durability.barred(error, path) or DiskAwayError(f"{path} cannot be read: {error}")


def is_checkpoint(path: epath.Path) -> bool:
    """Returns True for a finished Orbax checkpoint, also for a damaged one."""
    # Orbax renames a checkpoint that is whole. Until then the name has this part.
    if TEMPORARY in path.name:
        return False
    marks = [ORBAX_STEP_FILE, ORBAX_TREE_FILE]
    # A local checkpoint is renamed when whole. So a directory of this name is one, whatever files
    # were lost since.
    if storage.is_local(str(path)):
        marks += [FILE_NAME, DEFAULT_ITEM] if path.name.isdigit() else [FILE_NAME]
    return any(path_exists(path / mark) for mark in marks)


def managers_below(logdir: str) -> list[str]:
    """Returns the series at or right below ``logdir``; raises the errors of ``list_children``."""
    # Steps that were moved aside belong to the series above them.
    below = sorted(str(c) for c in list_children(logdir) if c.name != REPLACED)
    return [d for d in [str(epath.Path(logdir)), *below] if _holds_steps(d)]


def _holds_steps(directory: str) -> bool:
    try:
        return bool(steps_in(directory))
    except PermissionDeniedError:
        name = os.path.basename(directory)
        # Directories of the system never hold checkpoints.
        if name == "lost+found" or name.startswith("."):
            return False
        raise


def rank_steps(steps: list[StoredStep]) -> list[tuple[int, StoredStep, CheckpointManifest | None]]:
    """Returns (sequence number of the save, step, manifest), in the order of the saves.

    A step without a manifest follows the step before it.
    """
    last, found = 0, []
    for step in steps:
        try:
            manifest = read_manifest(step.path)
        except DataLossError:
            manifest = None
        # Damage must not move a step to another place in the order.
        last = manifest.sequence if manifest else last
        found.append((last, step, manifest))
    return sorted(found, key=lambda f: (f[0], f[1].number))


def newest_without_nan(
    steps: list[tuple[int, StoredStep, CheckpointManifest | None]],
) -> int | None:
    """Returns the last saved step without a NaN, or None if no step is known to have none.

    Args:
        steps: steps from ``rank_steps``.
    """
    sound = (
        step.number
        for _, step, manifest in reversed(steps)
        if manifest is not None and not manifest.with_nan
    )
    return next(sound, None)


def problems_of(step: StoredStep) -> list[str]:
    """Returns the problems of a checkpoint that names and sizes of files show."""
    try:
        manifest = read_manifest(step.path)
    except DataLossError as error:
        return [str(error)]
    if manifest is None:
        if is_ours(step.path):
            return ["its manifest is missing"]
        try:
            find_item(step.path)
        except DataLossError as error:
            return [error.message]
        except ValueError:
            # There are several items, of which a reader names one.
            return []
        return []
    return quick_problems(step.path, manifest)


def text_of(file: epath.Path) -> str:
    """Returns the text of a file of a checkpoint; a local file may not exceed a limit.

    Raises:
        OSError, UnicodeDecodeError: The file cannot be read, is too large, or is not text.
    """
    return durability.small_text(str(file)) if storage.is_local(str(file)) else file.read_text()


def is_ours(path: str) -> bool:
    """Returns True if a Saver wrote a checkpoint, which then must have a manifest."""
    here = epath.Path(path)
    for file in (here / ORBAX_STEP_FILE, here / DEFAULT_ITEM / ORBAX_TREE_FILE):
        try:
            if '"bellwether"' in text_of(file):
                return True
        except UnicodeDecodeError:
            continue
        except OSError as error:
            durability.raise_if_barred(error, str(file))
    return False


def read_record(directory: str) -> dict[str, Any]:
    """Returns the record of the run in a log directory; empty where there is none that may be read.

    Raises:
        UnavailableError: the record cannot be read now.
    """
    try:
        # A chief writes the record over a longer one, whose rest may still follow.
        record, _ = json.JSONDecoder().raw_decode(text_of(epath.Path(directory) / RUN_FILE))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and isinstance(
            away := durability.barred(error, directory), UnavailableError
        ):
            raise away from None
        return {}
    return record if isinstance(record, dict) else {}


def recorded_series(logdir: str) -> list[str]:
    """Returns the names of the series that runs of a log directory saved; raises as ``read_record``."""
    names = read_record(logdir).get("series")
    return [os.path.basename(str(name)) for name in names] if isinstance(names, list) else []


def series_in(logdir: str) -> list[str]:
    """Returns the series in which the checkpoints of a log directory are looked for.

    The series that the record of the run names come first. Other series, such as that of a user's
    own Saver, count only if no recorded series has a checkpoint.

    Raises:
        UnavailableError, PermissionDeniedError: as ``list_children``.
    """
    own = [str(epath.Path(logdir) / name) for name in recorded_series(logdir)]
    return [directory for directory in own if steps_in(directory)] or managers_below(logdir)


def newest_first(logdir: str) -> list[StoredStep]:
    """Returns the checkpoints of a log directory, the last saved first, or the checkpoint of a path."""
    by_directory = [found for d in series_in(logdir) if (found := rank_steps(steps_in(d)))]
    if not by_directory and (step := named_step(logdir)) is not None:
        return [step]
    by_directory.sort(key=lambda found: _saved_at(*found[-1][1:]), reverse=True)
    return [step for found in by_directory for _, step, _ in reversed(found)]


def _saved_at(step: StoredStep, manifest: CheckpointManifest | None) -> float:
    """Returns when a step was saved, Unix time in seconds; 0 for a step that was deleted at this moment."""
    if manifest is not None:
        return manifest.saved_at
    try:
        return float(epath.Path(step.path).stat().mtime)
    except FileNotFoundError:
        return 0.0


def newest_usable(
    logdir: str, use: Callable[[StoredStep], object]
) -> tuple[StoredStep | None, dict[str, Exception]]:
    """Returns the newest checkpoint of a log directory that can be used, and the errors of newer ones, by path.

    An error is logged for each checkpoint that cannot be used. The search begins anew if a
    checkpoint is deleted meanwhile, because a newer checkpoint has taken its place.

        whole, refused = newest_usable("logdir", lambda step: read_manifest(step.path))

    Args:
        logdir: log directory, or directory of one series.
        use: uses a checkpoint; raises one of ``UNUSABLE`` if that is impossible.
    """
    refused: dict[str, Exception] = {}
    while True:
        for step in newest_first(logdir):
            if step.path in refused:
                continue
            try:
                use(step)
            except UNUSABLE as error:
                if not path_exists(epath.Path(step.path)):
                    break
                logging.error("a checkpoint is passed over: %s", error)
                refused[step.path] = error
            else:
                return step, refused
        else:
            return None, refused


def latest_checkpoint(checkpoint_dir: str, latest_filename: str | None = None) -> str | None:
    """Returns the path of the newest whole checkpoint in a directory; None when there are no checkpoints at all.

    Checkpoints of the run itself come before those of other Savers beside it. A checkpoint with a
    missing file, or a file of a wrong size, is skipped, and an error is logged. Contents are
    compared with their checksums only by a restore. If all checkpoints are damaged, the newest is
    returned. Its restore raises DataLossError, so that no training script begins anew unnoticed.

        path = harness.latest_checkpoint("logdir")

    Args:
        checkpoint_dir: log directory, or directory of one series such as ``logdir/model.ckpt``.
        latest_filename: not used, as the directory itself shows its checkpoints; TF1 scripts pass
            this argument.

    Raises:
        UnavailableError: The directory cannot be read now, so it is unknown if there are
            checkpoints.
        PermissionDeniedError: The directory may not be read.
    """
    whole, refused = newest_usable(str(checkpoint_dir), check_files)
    found = whole.path if whole is not None else next(iter(refused), None)
    if found is None and _is_of_tensorflow(str(checkpoint_dir)):
        text = "the checkpoints at %s are TensorFlow's, which cannot be read"
        logging.log_every_n_seconds(logging.WARNING, text, timeouts.LOG_EVERY_SECS, checkpoint_dir)
    return found


def check_files(step: StoredStep) -> None:
    """Raises DataLossError if names or sizes of files show that a checkpoint is damaged."""
    if problems := problems_of(step):
        raise DataLossError(f"checkpoint {step.path} is damaged: {'; '.join(problems[:3])}")


def _is_of_tensorflow(path: str) -> bool:
    """Returns True if TensorFlow's checkpoints lie in a directory, or begin with a path."""
    # The path may be the first part of file names, such as `model.ckpt-100`.
    where, name = os.path.split(path.rstrip("/"))
    beside = [c for c in list_children(where or ".") if c.name.startswith(f"{name}.")]
    return any(
        re.search(r"\.data-\d{5}-of-\d{5}$", c.name) for c in [*list_children(path), *beside]
    )


def series_of(path: str) -> str:
    """Returns the directory of the series of a checkpoint."""
    parent = epath.Path(path).parent
    return str(parent.parent if parent.name == REPLACED else parent)


def saved_at(step: StoredStep) -> float:
    """Returns the time at which a checkpoint was saved, Unix time in seconds.

    Raises:
        DataLossError: The checkpoint is damaged.
        OSError: The checkpoint was deleted.
    """
    return _saved_at(step, read_manifest(step.path))


def step_of(path: str) -> int | None:
    """Returns the step in the name of a checkpoint; None for another name."""
    name = os.path.basename(path)
    return int(name) if name.isdigit() else None


def find_checkpoint(path: str) -> str | None:
    """Returns the directory of the checkpoint that a path names, or None.

    Args:
        path: ``logdir/model.ckpt/123``, ``logdir/model.ckpt-123``, or a directory of checkpoints,
            of which the newest is returned. Directories that plain Orbax saved into count too.
    """
    step = named_step(path)
    return step.path if step is not None else latest_checkpoint(path)


def named_step(path: str) -> StoredStep | None:
    """Returns the one checkpoint that a path names, in either spelling; None for a directory of checkpoints."""
    path = str(path).rstrip("/")
    # TF1 writes a minus before the step, Orbax a slash.
    match = re.fullmatch(r"(.+)[-/](\d+)", path)
    if is_checkpoint(epath.Path(path)):
        return StoredStep(int(match[2]) if match else 0, str(epath.Path(path)))
    steps = steps_in(match[1]) if match else []
    return next((step for step in steps if match and step.number == int(match[2])), None)


def find_item(path: str) -> str:
    """Returns the directory with the arrays of a checkpoint, which Orbax calls an item.

    Raises:
        DataLossError: The checkpoint has no item.
        ValueError: The checkpoint has several items.
    """
    here = epath.Path(path)
    if path_exists(here / ORBAX_TREE_FILE):
        return str(here)
    items = sorted(str(c) for c in list_children(path) if path_exists(c / ORBAX_TREE_FILE))
    if not items:
        raise DataLossError(
            f"{path} is damaged: it has no {ORBAX_TREE_FILE} and no item that has one"
        )
    for item in items:
        if epath.Path(item).name == DEFAULT_ITEM:
            return item
    if len(items) > 1:
        raise ValueError(f"{path} has several items, name one of them: {', '.join(items)}")
    return items[0]
