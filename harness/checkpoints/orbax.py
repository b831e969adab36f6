"""Orbax at work: its CheckpointManager names, finalises and retains; the tasks write the arrays.

The manager saves a tree of the manifest's entries, one for each variable. The handler of their type has every task
write its own variables into the temporary directory, each into a store of its own. These are merged, and looked
through, before the checkpoint gets its name.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from harness.checkpoints import layout
from harness.checkpoints.layout import REPLACED
from harness.checkpoints.manifest import Manifest, StoredArray
from harness.checkpoints.retention import Retention
from runtime import AbortedError, DataLossError, InternalError, OpError
from runtime.lowlevel import DiskFullError, one_line, storage

REMOVED = "removed"
"""Sub-directory into which a step is renamed before its files are deleted."""
_FULL = (28, 122, 27)  # ENOSPC, EDQUOT, EFBIG


class Phases(Protocol):
    """What of a save happens while Orbax makes its checkpoint, in this order."""

    with_nan: Sequence[str]
    """When it is written, the names of the variables in which there is a NaN."""

    def begin(self, sequence: int) -> Manifest:
        """Gives what is to be saved, under its number in the order of saves."""

    def write(self, item: str) -> Future[None]:
        """Begins to write the arrays into a directory."""

    def merge(self, item: epath.Path) -> None:
        """Makes one store of what was written."""

    def complete(self, temporary: str) -> None:
        """Looks through a checkpoint that has all but its name, and adds what belongs to it."""

    def confirm(self) -> None:
        """Raises AbortedError unless the checkpoint may get its name."""


class _Keep:
    """Orbax's preservation policies, over the steps in the order in which they were saved.

    Besides, they keep the last one without NaN: Orbax asks before it saves, when nobody knows yet whether the new one
    has any.

    Attributes:
        spared: the step that is kept for this alone.
    """

    def __init__(self, retention: Retention, sequence: Mapping[int, int], sound: int | None) -> None:
        pp = ocp.checkpoint_managers
        kept: list[Any] = [pp.LatestN(retention.max_to_keep or None)]
        if retention.every_n_hours is not None:
            kept.append(pp.EveryNSeconds(retention.every_n_hours * 3600))
        if retention.best:
            kept.append(
                pp.BestN(
                    get_metric_fn=retention.metric_of,
                    reverse=retention.best_mode == "min",
                    n=retention.best,
                    keep_checkpoints_without_metrics=False,
                )
            )
        self._policy = pp.AnyPreservationPolicy(kept)
        self._sequence = sequence
        self._sound = sound
        self.spared: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        order = sorted(range(len(checkpoints)), key=lambda i: self._sequence.get(checkpoints[i].step, 0))
        kept = self._policy.should_preserve([checkpoints[i] for i in order], context=context)
        by_place = [keep for _, keep in sorted(zip(order, kept, strict=True))]
        for i, checkpoint in enumerate(checkpoints):
            if checkpoint.step == self._sound and not by_place[i]:
                by_place[i], self.spared = True, self._sound
        return by_place


class Directory:
    """A CheckpointManager directory. One object for each directory of a process: get it from ``open_directory``."""

    def __init__(self, path: str, lock: threading.RLock) -> None:
        self.path = path
        self._lock = lock
        self._cleaned = False

    def save(self, step: int, phases: Phases, retention: Retention, metrics: Mapping[str, float] | None = None) -> str:
        """Saves and waits until the checkpoint is on disk, whole and durable, and what is not kept is gone.

        Returns the name of the checkpoint's directory.

        The first time, what dead chiefs left behind is cleaned away: the tasks must have been claimed before.

        Args:
            step: the step.
            phases: of the save.
            retention: what to keep.
            metrics: for keeping the best.

        Raises:
            DiskFullError: the disk is full.
            OpError: what went wrong on a task.
        """
        with self._lock, _quiet(), contextlib.ExitStack() as stack:
            try:
                if not self._cleaned:
                    self._clean()
                steps = layout.ranked(layout.steps_in(self.path))
                sequence = {found.number: number for number, found, _ in steps}
                retention = retention.named_as([os.path.basename(found.path) for _, found, _ in steps])
                kept = _Keep(retention, sequence, layout.newest_without_nan(steps))
                manager = self._open(step, phases, retention, kept)
            except Exception as error:
                raise _named(error, self.path) from None
            stack.callback(manager.close)
            self._cleaned = True
            manifest = phases.begin(max(sequence.values(), default=0) + 1)
            sequence[step] = manifest.sequence
            displaced = self._displace(manager, step)
            try:
                manager.save(
                    step,
                    args=ocp.args.PyTreeSave(dict(manifest.variables), custom_metadata=_sharding(manifest)),
                    metrics=None if metrics is None else {name: float(value) for name, value in metrics.items()},
                    custom_metadata={"bellwether": {"epoch": manifest.epoch, "sequence": manifest.sequence}},
                    force=True,
                )
                manager.wait_until_finished()
                manager.check_for_errors()
                if all(found.number != step for found in layout.steps_in(self.path)):
                    raise DataLossError(
                        f"step {step} did not appear in {self.path}: somebody removed it while it was written"
                    )
            except BaseException as error:
                reason = _named(error, self.path) if isinstance(error, Exception) else error
                stack.pop_all()
                self._abandon(manager, displaced, fenced=isinstance(reason, AbortedError))
                raise reason from None
            if kept.spared not in (None, step) and not phases.with_nan:
                try:
                    manager.delete(kept.spared)
                except Exception as error:  # the next save removes it
                    logging.warning("step %d stays in %s: %s", kept.spared, self.path, error)
            self._purge()
            return retention.name_of(step)

    def _open(self, step: int, phases: Phases, retention: Retention, kept: _Keep) -> ocp.CheckpointManager:
        local = storage.is_local(self.path)
        # Where there is no rename, Orbax writes into the final directory.
        final = str(epath.Path(self.path) / retention.name_of(step))
        handler = ocp.PyTreeCheckpointHandler(
            type_handler_registry=ocp.type_handlers.create_type_handler_registry((StoredArray, _Handler(phases))),
            multiprocessing_options=_this_process_only(),
        )
        # Orbax's own looks for what was written with a pattern: a path like runs/layers=[100,50] means another there.
        handler.finalize = phases.merge
        options = ocp.CheckpointManagerOptions(
            preservation_policy=kept,
            best_fn=retention.metric_of if retention.best else None,
            best_mode=retention.best_mode,
            step_format_fixed_length=retention.digits,
            cleanup_tmp_directories=not self._cleaned,
            todelete_subdir=REMOVED,
            temporary_path_class=_temporary_path_class(phases) if local else None,
            create=False,
            multiprocessing_options=_this_process_only(),
            async_options=ocp.AsyncOptions(
                create_directories_asynchronously=False,
                timeout_secs=24 * 3600,
                post_finalization_callback=None if local else functools.partial(phases.complete, final),
            ),
        )
        epath.Path(self.path).mkdir(parents=True, exist_ok=True)
        return _Manager(self.path, options=options, item_handlers=handler)

    def _clean(self) -> None:
        """Finishes what a dead chief was about: removals, and replacements that did not come to their end."""
        if not storage.is_local(self.path):
            return
        replaced = os.path.join(self.path, REPLACED)
        if os.path.isdir(replaced):
            for name in os.listdir(replaced):
                if not os.path.exists(os.path.join(self.path, name)):
                    os.rename(os.path.join(replaced, name), os.path.join(self.path, name))
        self._purge()

    def _purge(self) -> None:
        if not storage.is_local(self.path):
            return
        leaving = [d for name in (REMOVED, REPLACED) if os.path.isdir(d := os.path.join(self.path, name))]
        for directory in leaving:
            storage.sync(directory)
        if leaving:
            storage.sync(self.path)  # else a power cut may leave a step under its name with half its files
        for directory in leaving:
            shutil.rmtree(directory, ignore_errors=True)

    def _displace(self, manager: ocp.CheckpointManager, step: int) -> str | None:
        """Moves an older checkpoint of the same step out of the way; it comes back if the save fails."""
        for found in layout.steps_in(self.path):
            if found.number == step:
                if os.path.basename(os.path.dirname(found.path)) == REPLACED:
                    return found.path
                aside = os.path.join(self.path, REPLACED, os.path.basename(found.path))
                os.makedirs(os.path.dirname(aside), exist_ok=True)
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(found.path, aside)
                manager.reload()
                return aside
        return None

    def _abandon(self, manager: ocp.CheckpointManager, displaced: str | None, *, fenced: bool) -> None:
        """After a failed save: no leftovers.

        Who was fenced off touches nothing: what is there may be another chief's. If none has come after all (a task had
        restarted), the next save cleans up.
        """
        try:
            manager.close()
        except Exception as error:
            logging.info("closing a checkpoint manager after a failed save: %s", error)
        if fenced:
            self._cleaned = False
            return
        if displaced is not None and os.path.isdir(displaced):
            os.rename(displaced, os.path.join(self.path, os.path.basename(displaced)))
        if storage.is_local(self.path):
            for name in os.listdir(self.path):
                if layout.TEMPORARY in name:
                    shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)


class _Manager(ocp.CheckpointManager):  # type: ignore[misc]
    """A manager for which a checkpoint with damaged metrics is one without: it keeps no other from being saved."""

    def metrics(self, step: int) -> Any:
        """The metrics of a checkpoint; None where there are none that can be read."""
        try:
            found = super().metrics(step)
            if found is None or isinstance(found, dict):
                return found
            error: Exception | str = "they are no names with numbers"
        except (ValueError, OSError) as failure:
            error = failure
        logging.error("the metrics of step %d in %s cannot be read: %s", step, self.directory, error)
        return None


def _this_process_only() -> ocp.options.MultiprocessingOptions:
    """One process saves, also where ``jax.distributed`` has joined several: Orbax must not wait for the others."""
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    here = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"process{here}"
    )


class _Handler(ocp.type_handlers.NumpyHandler):  # type: ignore[misc]
    """Has the tasks write what the entries of the manifest tell of; in the checkpoint they are plain arrays."""

    def __init__(self, phases: Phases) -> None:
        super().__init__()
        self._phases = phases

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        return [self._phases.write(str(infos[0].parent_dir))]


def _temporary_path_class(phases: Phases) -> Any:
    base = ocp.path.atomicity.AtomicRenameTemporaryPath

    class SyncedRename(base):  # type: ignore[misc, valid-type]
        """Renames to the final name only what has its manifest and is on the disk as a whole."""

        async def finalize(self, *args: Any, **kwargs: Any) -> None:
            final: epath.Path = self.get_final()
            if layout.TEMPORARY in final.parent.name:  # an item of a step: the step comes later
                await super().finalize(*args, **kwargs)
                return
            phases.complete(str(self.get()))
            synced = final.parent / f"{final.name}{layout.TEMPORARY}-synced"
            shutil.rmtree(synced, ignore_errors=True)
            self._final_path = synced  # Orbax writes its last metadata and renames; nobody sees this name
            try:
                await super().finalize(*args, **kwargs)
            finally:
                self._final_path = final
            storage.sync_tree(str(synced), files=True)
            phases.confirm()
            os.rename(synced, final)
            storage.sync(str(final.parent))

    return SyncedRename


def _sharding(manifest: Manifest) -> dict[str, Any]:
    """Where each variable lived, for readers of the checkpoint's metadata."""
    return {
        "bellwether": {
            name: {"dtype": v.dtype, "shape": list(v.shape), "tasks": [t for t, _, _ in v.slices]}
            for name, v in manifest.variables.items()
        }
    }


def _named(error: Exception, path: str) -> Exception:
    """The error that a failed save gives its caller: the first of ours in the chain, or a full disk by its name."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OpError):
            return cause
        if isinstance(cause, OSError) and cause.errno in _FULL or "No space left" in str(cause):
            return DiskFullError(f"the disk of {path} is full: {cause}")
        if isinstance(cause, OSError) and (other := storage.barred(cause, path)) is not None:
            return other
        cause = cause.__cause__ or cause.__context__
    return InternalError(f"Orbax could not save into {path}: {one_line(error)}")


_directories: dict[str, Directory] = {}
_locks: dict[str, threading.RLock] = {}
_directories_lock = threading.Lock()


def open_directory(path: str) -> Directory:
    """The directory object of a path: the same for all savers of the process.

    The tasks are told the path as it was given: a link in it may lead elsewhere on their hosts. Paths that are the same
    place here share a lock.
    """
    path = storage.absolute(path)
    place = os.path.realpath(path) if storage.is_local(path) else path
    with _directories_lock:
        if path not in _directories:
            _directories[path] = Directory(path, _locks.setdefault(place, threading.RLock()))
        return _directories[path]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what Orbax logs during a save, some thirty lines, out of the training log; failures we tell."""

    def wanted(record: Any) -> bool:
        of_orbax = f"{os.sep}orbax{os.sep}checkpoint{os.sep}" in record.pathname
        return not of_orbax or logging.get_verbosity() >= logging.DEBUG or record.levelno >= 50

    logger = logging.get_absl_logger()
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)
