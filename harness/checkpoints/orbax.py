"""Orbax at work: its CheckpointManager names, finalises and retains; the tasks write the arrays.

The manager saves a tree of the manifest's entries, one for each variable. The handler of their type has every task
write its own variables into the temporary directory, each into a store of its own. These are merged, and looked
through, before the checkpoint gets its name.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from harness.checkpoints import layout
from harness.checkpoints.layout import REPLACED
from harness.checkpoints.manifest import FILE_NAME, UNCHECKED, Manifest, StoredArray
from runtime import AbortedError, DataLossError, InternalError, OpError, ResourceExhaustedError
from runtime.lowlevel import CheckpointFile, one_line, storage

REMOVED = "removed"
"""Sub-directory into which a step is renamed before its files are deleted."""
_FULL = (28, 122, 27)  # ENOSPC, EDQUOT, EFBIG


@dataclass
class Save:
    """One save.

    Attributes:
        step: the step.
        manifest: all but its files.
        process_ids: ids of the stores that will be written, and no others.
        write: has the tasks write into a directory; gives the files, relative to it.
        confirm: raises AbortedError when another chief has claimed the tasks meanwhile.
        metrics: for keeping the best.
    """

    step: int
    manifest: Manifest
    process_ids: Sequence[str]
    write: Callable[[str], Sequence[CheckpointFile]]
    confirm: Callable[[], object]
    metrics: Mapping[str, float] | None = None
    item: str = ""
    files: list[CheckpointFile] = field(default_factory=list)


@dataclass(frozen=True)
class Retention:
    """What to keep.

    Attributes:
        max_to_keep: the last so many; None or 0 keeps all.
        every_n_hours: besides, one for so many hours; None keeps no more.
        best: besides, the best so many by ``metric``; 0 keeps no more.
        metric: name of the metric.
        best_mode: "max" or "min".
        digits: pads step numbers with zeros to so many digits; None does not pad.
    """

    max_to_keep: int | None = 5
    every_n_hours: float | None = None
    best: int = 0
    metric: str = ""
    best_mode: str = "min"
    digits: int | None = None

    def metric_of(self, metrics: Mapping[str, float]) -> float:
        """The value that checkpoints are compared by: without one, or with NaN, a checkpoint is the worst."""
        value = float(metrics.get(self.metric, math.nan))
        worst = math.inf if self.best_mode == "min" else -math.inf
        return worst if math.isnan(value) else value


class _Keep:
    """Orbax's preservation policies, over the steps in the order in which they were saved."""

    def __init__(self, retention: Retention, sequence: Mapping[int, int]) -> None:
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

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        order = sorted(range(len(checkpoints)), key=lambda i: self._sequence.get(checkpoints[i].step, 0))
        kept = self._policy.should_preserve([checkpoints[i] for i in order], context=context)
        return [keep for _, keep in sorted(zip(order, kept, strict=True))]


class Directory:
    """A CheckpointManager directory. One object for each directory of a process: get it from ``open_directory``."""

    def __init__(self, path: str, lock: threading.RLock) -> None:
        self.path = path
        self._lock = lock
        self._manager: ocp.CheckpointManager | None = None
        self._retention = Retention()
        self._sequence: dict[int, int] = {}
        self._save: Save | None = None
        self._cleaned = False

    # -- opening -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(self, retention: Retention) -> Iterator[None]:
        """A context in which this directory can be saved into, by one thread at a time.

        The first time, what dead chiefs left behind is cleaned away: the tasks must have been claimed before.
        """
        with self._lock, _quiet:
            self._retention = retention
            try:
                if not self._cleaned:
                    self._clean()
                self._manager = self._open()
            except Exception as error:
                raise _named(error, self.path) from None
            self._cleaned = True
            try:
                yield
            finally:
                manager, self._manager = self._manager, None
                if manager is not None:
                    manager.close()

    def next_sequence(self) -> int:
        """The sequence number of the next checkpoint."""
        with self._lock:
            return max(self._sequence.values(), default=0) + 1

    def _open(self) -> ocp.CheckpointManager:
        self._sequence = {step.number: sequence for sequence, step, _ in layout.ranked(layout.steps_in(self.path))}
        retention = self._retention
        handler = ocp.PyTreeCheckpointHandler(
            type_handler_registry=ocp.type_handlers.create_type_handler_registry((StoredArray, _Handler(self))),
            multiprocessing_options=_this_process_only(),
        )
        # Orbax's own looks for what was written with a pattern: a path like runs/layers=[100,50] means another there.
        handler.finalize = self.merge
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_Keep(retention, self._sequence),
            best_fn=retention.metric_of if retention.best else None,
            best_mode=retention.best_mode,
            step_format_fixed_length=retention.digits,
            cleanup_tmp_directories=not self._cleaned,
            todelete_subdir=REMOVED,
            temporary_path_class=_temporary_path_class(self) if storage.is_local(self.path) else None,
            create=False,
            multiprocessing_options=_this_process_only(),
            async_options=ocp.AsyncOptions(
                create_directories_asynchronously=False,
                timeout_secs=24 * 3600,
                post_finalization_callback=None if storage.is_local(self.path) else self._complete_remote,
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

    def save(self, save: Save) -> str:
        """Saves and waits until the checkpoint is on disk, whole and durable.

        Returns:
            The path of the checkpoint.

        Raises:
            ResourceExhaustedError: the disk is full.
            OpError: what went wrong on a task.
        """
        with self._lock:
            assert self._manager is not None
            before = dict(self._sequence)
            self._sequence[save.step] = save.manifest.sequence
            self._save = save
            displaced = self._displace(save.step)
            done = False
            reason: Exception | None = None
            try:
                self._manager.save(
                    save.step,
                    args=ocp.args.PyTreeSave(dict(save.manifest.variables), custom_metadata=_sharding(save.manifest)),
                    metrics=dict(save.metrics) if save.metrics is not None else None,
                    custom_metadata={"bellwether": {"epoch": save.manifest.epoch, "sequence": save.manifest.sequence}},
                    force=True,
                )
                self._manager.wait_until_finished()
                self._manager.check_for_errors()
                path = self._path_of(save.step)
                done = True
            except Exception as error:
                reason = _named(error, self.path)
                raise reason from None
            finally:
                self._save = None
                if not done:
                    self._sequence = before
                    self._abandon(displaced, fenced=isinstance(reason, AbortedError))
            self._purge()
            return path

    def _path_of(self, step: int) -> str:
        for found in layout.steps_in(self.path):
            if found.number == step:
                return found.path
        raise DataLossError(f"step {step} did not appear in {self.path}: somebody removed it while it was written")

    def _displace(self, step: int) -> str | None:
        """Moves an older checkpoint of the same step out of the way; it comes back if the save fails."""
        assert self._manager is not None
        for found in layout.steps_in(self.path):
            if found.number == step:
                if os.path.basename(os.path.dirname(found.path)) == REPLACED:
                    return found.path
                aside = os.path.join(self.path, REPLACED, os.path.basename(found.path))
                os.makedirs(os.path.dirname(aside), exist_ok=True)
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(found.path, aside)
                self._manager.reload()
                return aside
        return None

    def _abandon(self, displaced: str | None, *, fenced: bool) -> None:
        """After a failed save: no leftovers, and no manager, which still believes what it hoped for.

        Who was fenced off touches nothing: what is there may be another chief's. If none has come after all (a task had
        restarted), the next save cleans up.
        """
        manager, self._manager = self._manager, None
        if manager is not None:
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
        self._manager = self._open()

    # -- called by Orbax ---------------------------------------------------------------------------------------

    def write(self, directory: str) -> concurrent.futures.Future[None]:
        """Begins to write the arrays of the save under way."""
        save = self._save
        assert save is not None
        save.item = os.path.basename(directory).partition(layout.TEMPORARY)[0]
        future: concurrent.futures.Future[None] = concurrent.futures.Future()

        def work() -> None:
            try:
                self._write(save, directory)
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, name="checkpoint-write", daemon=True).start()
        return future

    def _write(self, save: Save, directory: str) -> None:
        save.files = [replace(f, path=f"{save.item}/{f.path}") for f in save.write(directory)]
        self._check_writers(save, directory)

    def _check_writers(self, save: Save, directory: str) -> None:
        wanted = set(_stores(save))
        found = {c.name for c in epath.Path(directory).iterdir() if c.name.startswith(layout.STORE_OF_TASK)}
        if found != wanted:
            raise AbortedError(
                f"{directory} was written by {sorted(found)} instead of {sorted(wanted)}: two chiefs are at work"
            )

    def merge(self, directory: epath.Path) -> None:
        """Makes one store of what the tasks have written, each its own."""
        assert self._save is not None
        storage.merge(str(directory), _stores(self._save))

    def confirm(self) -> None:
        """Makes sure that no other chief has come while this one wrote, or was frozen."""
        assert self._save is not None
        self._save.confirm()

    def _complete_remote(self) -> None:
        assert self._save is not None  # where there is no rename, Orbax writes into the final directory
        self.complete(str(epath.Path(self.path) / str(self._save.step).zfill(self._retention.digits or 0)))

    def complete(self, temporary: str) -> None:
        """Adds the manifest to a checkpoint that is complete but for its name.

        Raises:
            DataLossError: an array is not there when it is looked for: nobody could restore it.
        """
        save = self._save
        assert save is not None
        item = str(epath.Path(temporary) / save.item)
        self._check_writers(save, item)
        problems = storage.lacking(item, [v.stored for v in save.manifest.variables.values()])
        if problems:
            raise DataLossError(
                f"what was written for step {save.step} cannot be read again: {'; '.join(problems[:3])}"
            )
        known = {f.path for f in save.files}
        rest = []
        if storage.is_local(temporary):
            for path in storage.files_below(temporary):
                if path not in known and path not in UNCHECKED:
                    size, crc = storage.checksum(os.path.join(temporary, path))
                    rest.append(CheckpointFile(path, size, crc))
        manifest = replace(save.manifest, files=[*save.files, *rest])
        (epath.Path(temporary) / FILE_NAME).write_text(manifest.to_json())


def _stores(save: Save) -> list[str]:
    """The stores of which a save is made, below the directory of its arrays."""
    return [f"{layout.STORE_OF_TASK}{i}" for i in save.process_ids]


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

    def __init__(self, directory: Directory) -> None:
        super().__init__()
        self._directory = directory

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        return [self._directory.write(str(infos[0].parent_dir))]


def _temporary_path_class(directory: Directory) -> Any:
    base = ocp.path.atomicity.AtomicRenameTemporaryPath

    class SyncedRename(base):  # type: ignore[misc, valid-type]
        """Renames to the final name only what has its manifest and is on the disk as a whole."""

        async def finalize(self, *args: Any, **kwargs: Any) -> None:
            final: epath.Path = self.get_final()
            if layout.TEMPORARY in final.parent.name:  # an item of a step: the step comes later
                await super().finalize(*args, **kwargs)
                return
            directory.complete(str(self.get()))
            synced = final.parent / f"{final.name}{layout.TEMPORARY}-synced"
            shutil.rmtree(synced, ignore_errors=True)
            self._final_path = synced  # Orbax writes its last metadata and renames; nobody sees this name
            try:
                await super().finalize(*args, **kwargs)
            finally:
                self._final_path = final
            storage.sync_tree(str(synced), files=True)
            directory.confirm()
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
            return ResourceExhaustedError(f"the disk of {path} is full: {cause}")
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


class _Quiet(contextlib.AbstractContextManager["_Quiet"]):
    """Keeps what Orbax logs during our saves, some thirty lines each, out of the training log; failures we tell."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._installed = False

    def __enter__(self) -> _Quiet:
        with self._lock:
            self._depth += 1
            if not self._installed:
                self._installed = True
                logging.get_absl_logger().addFilter(self._wanted)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1

    def _wanted(self, record: Any) -> bool:
        ours = self._depth > 0 and f"{os.sep}orbax{os.sep}checkpoint{os.sep}" in record.pathname
        return not ours or logging.get_verbosity() >= logging.DEBUG or record.levelno >= 50


_quiet = _Quiet()
