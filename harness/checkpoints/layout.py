"""Where checkpoints lie: ``logdir/model.ckpt/123`` is step 123 of the checkpoints saved as ``logdir/model.ckpt``.

``logdir/model.ckpt`` is a plain Orbax CheckpointManager directory. TF1's spelling ``logdir/model.ckpt-123`` is
understood wherever a checkpoint is named. Nothing holds an absolute path, so a directory may be moved.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from absl import logging
from etils import epath

from harness.checkpoints.manifest import FILE_NAME, Manifest, quick_problems, read_manifest
from runtime import DataLossError, InvalidArgumentError, NotFoundError, PermissionDeniedError, UnavailableError
from runtime.lowlevel import DiskAwayError, storage

ORBAX_STEP_FILE = "_CHECKPOINT_METADATA"
ORBAX_TREE_FILE = "_METADATA"
TEMPORARY = ".orbax-checkpoint-tmp"
DEFAULT_ITEM = "default"
MERGED_STORE = "manifest.ocdbt"
STORE_OF_TASK = "ocdbt.process_"
"""How the stores begin, one for each task that wrote, of which the store of a checkpoint is made."""
REPLACED = "replaced"
"""Sub-directory of a series in which a step waits while the same step is saved again."""
POLL_SECS = 1.0
"""How often a directory is looked at for a new checkpoint."""
LOG_EVERY_SECS = 10.0
RUN_FILE = "chief.lock"
"""The record of the run in its log directory. The chief writes the record and holds the lock of the file."""
UNUSABLE = (DataLossError, NotFoundError, InvalidArgumentError, FileNotFoundError)
"""Errors of one checkpoint that is damaged, gone or of another model; an older one may do."""


@dataclass(frozen=True)
class Step:
    """A finished checkpoint on disk.

    Attributes:
        number: the step.
        path: its own directory; below ``replaced`` when a chief died while it saved the same step again.
    """

    number: int
    path: str


@dataclass(frozen=True)
class CheckpointState:
    """What checkpoints a directory holds (TF1's CheckpointState).

    Attributes:
        model_checkpoint_path: the newest.
        all_model_checkpoint_paths: all, oldest first.
    """

    model_checkpoint_path: str
    all_model_checkpoint_paths: list[str] = field(default_factory=list)


def steps_in(directory: str) -> list[Step]:
    """The finished checkpoints of one CheckpointManager directory, whole or damaged, by number.

    Raises:
        UnavailableError, PermissionDeniedError: as ``children``.
    """
    found: dict[int, Step] = {}
    for parent in (directory, str(epath.Path(directory) / REPLACED)):
        for child in children(parent):
            if child.name.isdigit() and int(child.name) not in found and is_checkpoint(child):
                found[int(child.name)] = Step(int(child.name), str(child))
        if not storage.is_local(directory):
            break  # nothing is moved there
    return [found[number] for number in sorted(found)]


def children(directory: str) -> list[epath.Path]:
    """What lies in a directory; nothing only where it is known that there is nothing.

    Raises:
        UnavailableError: it cannot be looked into now.
        PermissionDeniedError: it may not be looked into.
    """
    root = epath.Path(directory)
    if not storage.is_local(directory):
        return list(root.iterdir()) if root.is_dir() else []
    try:
        return [root / name for name in os.listdir(directory)]
    except OSError as error:
        if error.errno in storage.NOTHING_THERE:
            return []
        raise _barred(error, directory) from None


def exists(path: epath.Path) -> bool:
    """Whether there is such a file or directory; raises as ``children``."""
    if not storage.is_local(str(path)):
        return bool(path.exists())
    try:
        os.stat(path)
    except OSError as error:
        if error.errno in storage.NOTHING_THERE:
            return False
        raise _barred(error, str(path)) from None
    return True


def _barred(error: OSError, path: str) -> Exception:
    return storage.barred(error, path) or DiskAwayError(f"{path} cannot be read: {error}")


def is_checkpoint(path: epath.Path) -> bool:
    """Whether a directory is a finished Orbax checkpoint, or what is left of one."""
    if TEMPORARY in path.name:
        return False
    marks = [ORBAX_STEP_FILE, ORBAX_TREE_FILE]
    if storage.is_local(str(path)):  # it got its name when it was whole, so it is one whatever it has lost since
        marks += [FILE_NAME, DEFAULT_ITEM] if path.name.isdigit() else [FILE_NAME]
    return any(exists(path / mark) for mark in marks)


def managers_below(logdir: str) -> list[str]:
    """The directories with checkpoints at or right below ``logdir``; raises as ``children``."""
    below = sorted(str(c) for c in children(logdir) if c.name != REPLACED)
    return [d for d in [str(epath.Path(logdir)), *below] if _holds_steps(d)]


def _holds_steps(directory: str) -> bool:
    try:
        return bool(steps_in(directory))
    except PermissionDeniedError:
        name = os.path.basename(directory)
        if name == "lost+found" or name.startswith("."):  # the system's: there never are checkpoints
            return False
        raise


def in_order(steps: list[Step]) -> list[tuple[Step, Manifest | None]]:
    """Steps with their manifests in the order in which they were saved."""
    return [(step, manifest) for _, step, manifest in ranked(steps)]


def ranked(steps: list[Step]) -> list[tuple[int, Step, Manifest | None]]:
    """Steps with the sequence numbers of their saves, in that order; one without comes after the step before it."""
    last, found = 0, []
    for step in steps:
        try:
            manifest = read_manifest(step.path)
        except DataLossError:
            manifest = None
        last = manifest.sequence if manifest else last
        found.append((last, step, manifest))
    return sorted(found, key=lambda f: (f[0], f[1].number))


def newest_without_nan(steps: list[tuple[int, Step, Manifest | None]]) -> int | None:
    """The step saved last of those whose variables had no NaN; None where there is none of which that is known.

    Args:
        steps: as ``ranked`` gives them.
    """
    sound = (step.number for _, step, manifest in reversed(steps) if manifest is not None and not manifest.with_nan)
    return next(sound, None)


def problems_of(step: Step) -> list[str]:
    """What is wrong with a checkpoint as far as a look at its directory tells; empty when nothing is."""
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
        except ValueError:  # several items: whoever reads it names one
            return []
        return []
    return quick_problems(step.path, manifest)


def text_of(file: epath.Path) -> str:
    """The text of a file of a checkpoint, in a local directory not more of it than there may be.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read, or is not such a file.
    """
    return storage.small_text(str(file)) if storage.is_local(str(file)) else file.read_text()


def is_ours(path: str) -> bool:
    """Whether a Saver wrote a checkpoint, and so it must have a manifest."""
    here = epath.Path(path)
    for file in (here / ORBAX_STEP_FILE, here / DEFAULT_ITEM / ORBAX_TREE_FILE):
        try:
            if '"bellwether"' in text_of(file):
                return True
        except UnicodeDecodeError:
            continue
        except OSError as error:
            storage.raise_if_barred(error, str(file))
    return False


def read_record(directory: str) -> dict[str, Any]:
    """Returns the record of the run in a log directory; empty where there is none that may be read.

    Raises:
        UnavailableError: the record cannot be read now.
    """
    try:
        record, _ = json.JSONDecoder().raw_decode(text_of(epath.Path(directory) / RUN_FILE))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and isinstance(away := storage.barred(error, directory), UnavailableError):
            raise away from None
        return {}
    return record if isinstance(record, dict) else {}


def recorded_series(logdir: str) -> list[str]:
    """Returns the names of the series that the runs of a log directory have saved; raises as ``read_record``."""
    names = read_record(logdir).get("series")
    return [os.path.basename(str(name)) for name in names] if isinstance(names, list) else []


def series_in(logdir: str) -> list[str]:
    """Returns the series in which the checkpoints of a log directory are looked for.

    What its runs have saved comes first: the series that the record names. Series of others, such as that of a Saver of
    the user's own, count only where no recorded series has a checkpoint, or no run has written a record.

    Raises:
        UnavailableError, PermissionDeniedError: as ``children``.
    """
    own = [str(epath.Path(logdir) / name) for name in recorded_series(logdir)]
    return [directory for directory in own if steps_in(directory)] or managers_below(logdir)


def newest_first(logdir: str) -> list[Step]:
    """Returns the checkpoints of the series of a log directory, the last saved first; or the one that a path names."""
    by_directory = [found for d in series_in(logdir) if (found := in_order(steps_in(d)))]
    if not by_directory and (step := named(logdir)) is not None:
        return [step]
    by_directory.sort(key=lambda found: _saved_at(*found[-1]), reverse=True)
    return [step for found in by_directory for step, _ in reversed(found)]


def _saved_at(step: Step, manifest: Manifest | None) -> float:
    """Returns when a step was saved, Unix time in seconds; 0 for a step that was deleted at this moment."""
    if manifest is not None:
        return manifest.saved_at
    try:
        return float(epath.Path(step.path).stat().mtime)
    except FileNotFoundError:
        return 0.0


def newest_usable(logdir: str, use: Callable[[Step], object]) -> tuple[Step | None, dict[str, Exception]]:
    """Returns the newest checkpoint of a log directory that can be used, and the errors of newer ones, by path.

    A checkpoint that cannot be used is named in an error that is logged. The search begins anew when a checkpoint is
    deleted meanwhile: a newer one has taken its place.

    Args:
        logdir: the directory, or that of one series.
        use: uses a checkpoint; raises one of ``UNUSABLE`` where that is not possible.
    """
    refused: dict[str, Exception] = {}
    while True:
        for step in newest_first(logdir):
            if step.path in refused:
                continue
            try:
                use(step)
            except UNUSABLE as error:
                if not exists(epath.Path(step.path)):
                    break
                logging.error("a checkpoint is passed over: %s", error)
                refused[step.path] = error
            else:
                return step, refused
        else:
            return None, refused


def latest_checkpoint(checkpoint_dir: str, latest_filename: str | None = None) -> str | None:
    """Returns the path of the newest whole checkpoint in a directory; None when there are no checkpoints at all.

    What the run itself has saved counts before what other Savers have saved beside it. A damaged checkpoint (a file
    missing or of a wrong size) is passed over, and an error that names it is logged; contents are compared with their
    checksums when a checkpoint is restored. When all are damaged the newest of them is returned: restoring it raises
    DataLossError, so that a training script does not begin anew without noticing.

    Args:
        checkpoint_dir: the directory (or that of one series, ``logdir/model.ckpt``).
        latest_filename: not used; the directory itself says what is in it.

    Raises:
        UnavailableError: the directory cannot be looked into now, so nobody knows whether there are checkpoints.
        PermissionDeniedError: it may not be looked into.
    """
    found = _newest(str(checkpoint_dir))
    if found is None and _is_of_tensorflow(str(checkpoint_dir)):
        text = "the checkpoints at %s are TensorFlow's, which cannot be read"
        logging.log_every_n_seconds(logging.WARNING, text, LOG_EVERY_SECS, checkpoint_dir)
    return found


def _newest(checkpoint_dir: str, *, damaged: bool = True) -> str | None:
    """Returns the newest whole checkpoint; where all are damaged the newest of those, if `damaged`."""

    def check(step: Step) -> None:
        if problems := problems_of(step):
            raise DataLossError(f"checkpoint {step.path} is damaged: {'; '.join(problems[:3])}")

    whole, refused = newest_usable(checkpoint_dir, check)
    if whole is not None:
        return whole.path
    return next(iter(refused), None) if damaged else None


def _is_of_tensorflow(path: str) -> bool:
    """Returns True if TensorFlow's checkpoints lie in a directory, or begin with a path."""
    where, name = os.path.split(path.rstrip("/"))
    beside = [c for c in children(where or ".") if c.name.startswith(f"{name}.")]
    return any(re.search(r"\.data-\d{5}-of-\d{5}$", c.name) for c in [*children(path), *beside])


def get_checkpoint_state(checkpoint_dir: str, latest_filename: str | None = None) -> CheckpointState | None:
    """The checkpoints in a directory, or None when there is none; arguments as in ``latest_checkpoint``."""
    newest = latest_checkpoint(checkpoint_dir, latest_filename)
    if newest is None:
        return None
    series = series_of(newest)
    return CheckpointState(newest, [step.path for step, _ in in_order(steps_in(series))])


def series_of(path: str) -> str:
    """The CheckpointManager directory of a checkpoint."""
    parent = epath.Path(path).parent
    return str(parent.parent if parent.name == REPLACED else parent)


def saved_at(step: Step) -> float:
    """When a checkpoint was saved, Unix time in seconds.

    Raises:
        DataLossError: it is damaged.
        OSError: it is not there any more.
    """
    return _saved_at(step, read_manifest(step.path))


def checkpoints_iterator(
    checkpoint_dir: str,
    min_interval_secs: float = 0.0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """The newest checkpoint of a directory each time there is a newer one; looks once a second.

    Args:
        checkpoint_dir: the directory.
        min_interval_secs: seconds between two checkpoints that are given.
        timeout: seconds to wait for a new one; None waits for ever, and says every 10 s that it does.
        timeout_fn: called when the time is up; the wait ends when it gives True (or is None), else it begins anew.
    """
    last: str | None = None
    given_at = -min_interval_secs
    while True:
        found = _wait_for_newer(checkpoint_dir, last, timeout)
        if found is None:
            if timeout_fn is None or timeout_fn():
                return
            continue
        left = given_at + min_interval_secs - time.monotonic()
        if left > 0:
            threading.Event().wait(left)  # an event nobody sets: there is nothing to be told of in a directory
        last, given_at = found, time.monotonic()
        yield found


def _wait_for_newer(directory: str, last: str | None, timeout: float | None) -> str | None:
    started = time.monotonic()
    logged_at = started
    while True:
        reason = ""
        try:
            found = _newest(directory, damaged=False)
            if found is not None and found != last:
                return found
        except UnavailableError as error:
            reason = f": {error.message}"
        now = time.monotonic()
        if timeout is not None and now - started >= timeout:
            return None
        if now - logged_at >= LOG_EVERY_SECS:
            logged_at = now
            logging.warning("still waiting for a new checkpoint in %s%s", directory, reason)
        threading.Event().wait(POLL_SECS if timeout is None else min(POLL_SECS, timeout))


def find_checkpoint(path: str) -> str | None:
    """The directory of the checkpoint that a path names, or None.

    Args:
        path: ``logdir/model.ckpt/123``, ``logdir/model.ckpt-123``, or a directory of checkpoints, which stands for its
            newest; also any directory that Orbax saved into.
    """
    step = named(path)
    return step.path if step is not None else latest_checkpoint(path)


def named(path: str) -> Step | None:
    """Returns the one checkpoint that a path names, in either spelling; None for a directory of checkpoints."""
    path = str(path).rstrip("/")
    match = re.fullmatch(r"(.+)[-/](\d+)", path)
    if is_checkpoint(epath.Path(path)):
        return Step(int(match[2]) if match else 0, str(epath.Path(path)))
    steps = steps_in(match[1]) if match else []
    return next((step for step in steps if match and step.number == int(match[2])), None)


def checkpoint_exists(checkpoint_prefix: str) -> bool:
    """Whether there is a finished checkpoint of this name (see ``find_checkpoint`` for the spellings)."""
    return find_checkpoint(str(checkpoint_prefix)) is not None


def find_item(path: str) -> str:
    """The directory of a checkpoint that holds its arrays: Orbax calls it an item.

    Raises:
        DataLossError: there is none.
        ValueError: there are several.
    """
    here = epath.Path(path)
    if exists(here / ORBAX_TREE_FILE):
        return str(here)
    items = sorted(str(c) for c in children(path) if exists(c / ORBAX_TREE_FILE))
    if not items:
        raise DataLossError(f"{path} is damaged: it has no {ORBAX_TREE_FILE} and no item that has one")
    for item in items:
        if epath.Path(item).name == DEFAULT_ITEM:
            return item
    if len(items) > 1:
        raise ValueError(f"{path} has several items, name one of them: {', '.join(items)}")
    return items[0]
