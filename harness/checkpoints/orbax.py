"""Saving with Orbax: its CheckpointManager names, finalises and retains checkpoints, and the tasks write the arrays.

A ``SaveJob`` calls ``SeriesDirectory.save``, and the manager calls the job's phases. The manager saves a
tree of the manifest's entries, one for each variable. The handler of their type has every task
write its variables into the temporary directory, each task into a store of its own. The stores are
merged and checked before the checkpoint gets its name.
"""

import contextlib
import functools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from harness.checkpoints import layout
from harness.checkpoints.layout import REPLACED
from harness.checkpoints.manifest import CheckpointManifest, StoredArray
from harness.checkpoints.retention import RetentionRule
from runtime import AbortedError, DataLossError, InternalError, OpError, concurrency
from runtime.lowlevel import DiskFullError, durability, one_line, storage

REMOVED = "removed"
"""Sub-directory into which a step is renamed before its files are deleted."""
# ENOSPC, EDQUOT, EFBIG
_FULL = (28, 122, 27)


class Phases(Protocol):
    """The phases of a save that run while Orbax makes the checkpoint, in this order."""

    with_nan: Sequence[str]
    """Names of the variables with a NaN, after the tasks have written."""

    def begin(self, sequence: int) -> CheckpointManifest:
        """Returns the manifest of the save with number ``sequence`` in the order of saves."""

    def write(self, item: str) -> Future[None]:
        """Starts to write the arrays into a directory."""

    def merge(self, item: epath.Path) -> None:
        """Makes one store of the stores of the tasks."""

    def complete(self, temporary: str) -> None:
        """Checks a checkpoint that has all but its name, and adds the manifest."""

    def confirm(self) -> None:
        """Raises AbortedError unless the checkpoint may get its name."""


class _KeepPolicy:
    """The checkpoints to keep, by Orbax's preservation policies in the order of saves.

    The last checkpoint without NaN is kept too. Orbax asks before the save, when it is unknown if
    the new checkpoint has a NaN.

    Attributes:
        spared: the step that is kept only for having no NaN.
    """

    def __init__(
        self, retention: RetentionRule, sequence: Mapping[int, int], sound: int | None
    ) -> None:
        pp = ocp.checkpoint_managers
        kept: list[Any] = [pp.LatestN(retention.max_to_keep or None)]
        if retention.every_n_hours is not None:
            kept.append(pp.EveryNSeconds(retention.every_n_hours * 3600))
        self._policy = pp.AnyPreservationPolicy(kept)
        self._sequence = sequence
        self._sound = sound
        self.spared: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        # Orbax sorts by step, and a run that went back saves a lower step later.
        order = sorted(
            range(len(checkpoints)), key=lambda i: self._sequence.get(checkpoints[i].step, 0)
        )
        kept = self._policy.should_preserve([checkpoints[i] for i in order], context=context)
        by_place = [keep for _, keep in sorted(zip(order, kept, strict=True))]
        for i, checkpoint in enumerate(checkpoints):
            if checkpoint.step == self._sound and not by_place[i]:
                by_place[i], self.spared = True, self._sound
        return by_place


class SeriesDirectory:
    """A CheckpointManager directory, of which a process has one object; see ``open_directory``."""

    def __init__(self, path: str, lock: concurrency.RLock) -> None:
        self.path = path
        self._lock = lock
        self._cleaned = False

    def save(self, step: int, phases: Phases, retention: RetentionRule) -> None:
        """Saves a checkpoint and waits until it is durable and older ones are deleted.

        The first save deletes the remains of dead chiefs, so the tasks must have been claimed
        before.

        Args:
            step: step of the checkpoint.
            phases: phases of the save.
            retention: rule of the checkpoints to keep.

        Raises:
            DiskFullError: The disk is full.
            OpError: The save failed on a task.
        """
        with self._lock, _without_log_lines(), contextlib.ExitStack() as stack:
            try:
                if not self._cleaned:
                    self._clean_up()
                steps = layout.rank_steps(layout.steps_in(self.path))
                sequence = {found.number: number for number, found, _ in steps}
                kept = _KeepPolicy(retention, sequence, layout.newest_without_nan(steps))
                manager = self._open_manager(step, phases, kept)
            except Exception as error:
                raise _save_error(error, self.path) from None
            stack.callback(manager.close)
            self._cleaned = True
            manifest = phases.begin(max(sequence.values(), default=0) + 1)
            assert manifest.sequence > max(sequence.values(), default=0)
            sequence[step] = manifest.sequence
            displaced = self._move_aside(manager, step)
            try:
                self._write_step(manager, step, manifest)
            except BaseException as error:
                reason = _save_error(error, self.path) if isinstance(error, Exception) else error
                # ``_abandon_save`` closes the manager itself, because the close of a failed save may
                # raise too.
                stack.pop_all()
                self._abandon_save(manager, displaced, fenced=isinstance(reason, AbortedError))
                raise reason from None
            # The new checkpoint has no NaN, so the older one is not needed as the last sound one.
            if kept.spared not in (None, step) and not phases.with_nan:
                try:
                    manager.delete(kept.spared)
                except Exception as error:
                    # The next save deletes the step.
                    logging.warning("step %d stays in %s: %s", kept.spared, self.path, error)
            self._delete_leaving()

    def _write_step(
        self, manager: ocp.CheckpointManager, step: int, manifest: CheckpointManifest
    ) -> None:
        """Saves a step and waits until the step is durable."""
        manager.save(
            step,
            args=ocp.args.PyTreeSave(dict(manifest.variables), custom_metadata={"bellwether": {}}),
            custom_metadata={
                "bellwether": {"epoch": manifest.epoch, "sequence": manifest.sequence}
            },
            force=True,
        )
        manager.wait_until_finished()
        manager.check_for_errors()
        # Orbax reports no error when a program of others has removed the directory meanwhile.
        if all(found.number != step for found in layout.steps_in(self.path)):
            raise DataLossError(
                f"step {step} did not appear in {self.path}: somebody removed it while it was "
                "written"
            )

    def _open_manager(self, step: int, phases: Phases, kept: _KeepPolicy) -> ocp.CheckpointManager:
        local = storage.is_local(self.path)
        # An object store has no rename, so Orbax writes into the final directory there.
        final = str(epath.Path(self.path) / str(step))
        handler = ocp.PyTreeCheckpointHandler(
            type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                (StoredArray, _ArrayHandler(phases))
            ),
            multiprocessing_options=_this_process_only(),
        )
        # Orbax's own method looks for the stores by a glob pattern, which a path like
        # runs/layers=[100,50] would break.
        handler.finalize = phases.merge
        options = ocp.CheckpointManagerOptions(
            preservation_policy=kept,
            cleanup_tmp_directories=not self._cleaned,
            todelete_subdir=REMOVED,
            temporary_path_class=_temporary_path_class(phases) if local else None,
            create=False,
            multiprocessing_options=_this_process_only(),
            async_options=ocp.AsyncOptions(
                create_directories_asynchronously=False,
                timeout_secs=24 * 3600,
                post_finalization_callback=None
                if local
                else functools.partial(phases.complete, final),
            ),
        )
        epath.Path(self.path).mkdir(parents=True, exist_ok=True)
        return ocp.CheckpointManager(self.path, options=options, item_handlers=handler)

    def _clean_up(self) -> None:
        """Finishes deletions and replacements that a dead chief had begun."""
        if not storage.is_local(self.path):
            return
        replaced = os.path.join(self.path, REPLACED)
        if os.path.isdir(replaced):
            for name in os.listdir(replaced):
                # The chief died before the new checkpoint of the step got its name, so the old one
                # returns.
                if not os.path.exists(os.path.join(self.path, name)):
                    os.rename(os.path.join(replaced, name), os.path.join(self.path, name))
        self._delete_leaving()

    def _delete_leaving(self) -> None:
        if not storage.is_local(self.path):
            return
        leaving = [
            d for name in (REMOVED, REPLACED) if os.path.isdir(d := os.path.join(self.path, name))
        ]
        for directory in leaving:
            durability.sync(directory)
        if leaving:
            # Without this, a power cut may leave a step under its name with half its files.
            durability.sync(self.path)
        for directory in leaving:
            shutil.rmtree(directory, ignore_errors=True)

    def _move_aside(self, manager: ocp.CheckpointManager, step: int) -> str | None:
        """Moves an older checkpoint of the same step aside, from where a failed save restores it."""
        for found in layout.steps_in(self.path):
            if found.number == step:
                if os.path.basename(os.path.dirname(found.path)) == REPLACED:
                    return found.path
                aside = os.path.join(self.path, REPLACED, os.path.basename(found.path))
                os.makedirs(os.path.dirname(aside), exist_ok=True)
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(found.path, aside)
                # Orbax has read the directory before, and refuses a step that it knows.
                manager.reload()
                return aside
        return None

    def _abandon_save(
        self, manager: ocp.CheckpointManager, displaced: str | None, *, fenced: bool
    ) -> None:
        """Deletes the remains of a failed save.

        A chief that was fenced off touches nothing, because the files may be another chief's. If
        there is no other chief, as when a task has restarted, the next save cleans up.
        """
        try:
            manager.close()
        except Exception as error:
            logging.info("closing a checkpoint manager after a failed save: %s", error)
        # The next save of this process cleans again, after it was allowed to lead.
        if fenced:
            self._cleaned = False
            return
        if displaced is not None and os.path.isdir(displaced):
            os.rename(displaced, os.path.join(self.path, os.path.basename(displaced)))
        if storage.is_local(self.path):
            for name in os.listdir(self.path):
                if layout.TEMPORARY in name:
                    shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)


def _this_process_only() -> ocp.options.MultiprocessingOptions:
    """Returns options with which Orbax waits for no other process of ``jax.distributed``."""
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    here = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"process{here}"
    )


class _ArrayHandler(ocp.type_handlers.NumpyHandler):  # type: ignore[misc]
    """A handler that has the tasks write the arrays of the manifest's entries.

    In the checkpoint the arrays are those of plain numpy.
    """

    def __init__(self, phases: Phases) -> None:
        super().__init__()
        self._phases = phases

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Any = None
    ) -> Sequence[Any]:
        return [self._phases.write(str(infos[0].parent_dir))]


def _temporary_path_class(phases: Phases) -> Any:
    base = ocp.path.atomicity.AtomicRenameTemporaryPath

    class SyncedRename(base):  # type: ignore[misc, valid-type]
        """A temporary directory that gets the final name after the manifest is written and all is synced."""

        async def finalize(self, *args: Any, **kwargs: Any) -> None:
            final: epath.Path = self.get_final()
            # An item of a step is finalised before the step itself.
            if layout.TEMPORARY in final.parent.name:
                await super().finalize(*args, **kwargs)
                return
            phases.complete(str(self.get()))
            synced = final.parent / f"{final.name}{layout.TEMPORARY}-synced"
            shutil.rmtree(synced, ignore_errors=True)
            # Orbax writes the last metadata and then renames. Readers ignore this name, so the
            # files can be synced.
            self._final_path = synced
            try:
                await super().finalize(*args, **kwargs)
            finally:
                self._final_path = final
            durability.sync_tree(str(synced), files=True)
            phases.confirm()
            os.rename(synced, final)
            durability.sync(str(final.parent))

    return SyncedRename


def _save_error(error: Exception, path: str) -> Exception:
    """Returns the error of a failed save: the first OpError in the chain, or the error of the disk."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OpError):
            return cause
        if isinstance(cause, OSError) and cause.errno in _FULL or "No space left" in str(cause):
            return DiskFullError(f"the disk of {path} is full: {cause}")
        if isinstance(cause, OSError) and (other := durability.barred(cause, path)) is not None:
            return other
        cause = cause.__cause__ or cause.__context__
    return InternalError(f"Orbax could not save into {path}: {one_line(error)}")


_directories: dict[str, SeriesDirectory] = {}
_locks: dict[str, concurrency.RLock] = {}
_directories_lock = concurrency.Lock()


def open_directory(path: str) -> SeriesDirectory:
    """Returns the object of a path, the same for all Savers of the process.

    The tasks receive the path as given, because a link may lead elsewhere on their hosts. Paths of
    the same place here share a lock.
    """
    path = storage.absolute(path)
    place = os.path.realpath(path) if storage.is_local(path) else path
    with _directories_lock:
        if path not in _directories:
            _directories[path] = SeriesDirectory(
                path, _locks.setdefault(place, concurrency.RLock())
            )
        return _directories[path]


@contextlib.contextmanager
def _without_log_lines() -> Iterator[None]:
    """Suppresses the log lines of Orbax, about thirty for each save; failures are raised as errors."""

    def wanted(record: Any) -> bool:
        of_orbax = f"{os.sep}orbax{os.sep}checkpoint{os.sep}" in record.pathname
        return not of_orbax or logging.get_verbosity() >= logging.DEBUG or record.levelno >= 50

    # absl has one logger, so the file of a line tells that the line is of Orbax.
    logger = logging.get_absl_logger()
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)
