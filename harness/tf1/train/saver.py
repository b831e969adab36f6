"""Savers and readers of checkpoints, and ``tf.summary.FileWriter``: the harness's, by TensorFlow's arguments."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.checkpoints import layout as _layout
from harness.checkpoints import reader as _reader
from harness.checkpoints import saver as _saver
from harness.tensorboard import writer as _writer
from runtime import get_default_graph
from runtime.lowlevel import DType, canonical_dtype


class SaverDef:
    """Names of TensorFlow's checkpoint formats; the format here is Orbax's whichever is asked for."""

    LEGACY, V1, V2 = 0, 1, 2


class Saver(_saver.Saver):
    """``harness.Saver``; graphs are not saved, and names of formats and of graph files are accepted without an effect.

    Args:
        var_list: as in ``harness.Saver``; so are the arguments that are not told of.
        reshape: must be False: a variable takes values of its own shape.
        sharded: not needed: every task writes its own variables.
        max_to_keep: the last so many checkpoints are kept; None or 0 keeps all.
        keep_checkpoint_every_n_hours: besides, one is kept for every so many hours.
        name: not used, as are ``restore_sequentially``, ``write_version``, ``save_relative_paths``
            and ``filename``.
        restore_sequentially: see ``name``.
        saver_def: must be None.
        builder: must be None.
        defer_build: look for the variables when the first save or restore comes.
        allow_empty: saving nothing is no error.
        write_version: see ``name``.
        pad_step_number: see ``name``.
        save_relative_paths: see ``name``; nothing in a checkpoint holds an absolute path.
        filename: see ``name``.
        options: further ones of ``harness.Saver``.

    Raises:
        ValueError: ``reshape``, ``saver_def`` or ``builder`` is given.
    """

    def __init__(
        self,
        var_list: Any = None,
        reshape: bool = False,
        sharded: bool = False,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = 10000.0,
        name: str | None = None,
        restore_sequentially: bool = False,
        saver_def: Any = None,
        builder: Any = None,
        defer_build: bool = False,
        allow_empty: bool = False,
        write_version: int = SaverDef.V2,
        pad_step_number: bool = False,
        save_relative_paths: bool = False,
        filename: str | None = None,
        **options: Any,
    ) -> None:
        if reshape:
            raise ValueError(
                "Saver: reshape=True is not in harness.tf1: restore the variable and use tf.reshape"
            )
        if saver_def is not None or builder is not None:
            raise ValueError(
                "Saver: saver_def and builder are not in harness.tf1: give it the variables"
            )
        super().__init__(
            var_list,
            max_to_keep=max_to_keep,
            keep_checkpoint_every_n_hours=keep_checkpoint_every_n_hours,
            allow_empty=allow_empty,
            defer_build=defer_build,
            **options,
        )

    def save(
        self,
        sess: Any,
        save_path: str | os.PathLike[str],
        global_step: Any = None,
        latest_filename: str | None = None,
        meta_graph_suffix: str = "meta",
        write_meta_graph: bool = True,
        write_state: bool = True,
        strip_default_attrs: bool = False,
        **options: Any,
    ) -> Any:
        """Saves as ``harness.Saver.save`` does.

        Args:
            sess: a session of the cluster.
            save_path: ``logdir/model.ckpt``.
            global_step: the step in the name.
            latest_filename: must be None or "checkpoint": no file lists the checkpoints, their
                directory does.
            meta_graph_suffix: not used, as are ``write_meta_graph`` and ``strip_default_attrs``: no
                graph is written.
            write_meta_graph: see above.
            write_state: must be True, for the reason of ``latest_filename``.
            strip_default_attrs: see above.
            options: further ones of ``harness.Saver.save``.

        Raises:
            ValueError: another ``latest_filename``, or ``write_state=False``.
        """
        if latest_filename not in (None, "checkpoint") or not write_state:
            given = (
                "write_state=False" if not write_state else f"latest_filename={latest_filename!r}"
            )
            raise ValueError(
                f"Saver.save: {given} cannot keep a checkpoint out of tf.train.latest_checkpoint, "
                "which looks into "
                "the directory: save into a directory of its own"
            )
        return super().save(sess, save_path, global_step, **options)

    def recover_last_checkpoints(self, checkpoint_paths: Sequence[str]) -> None:
        """Names checkpoints of an earlier run, of which ``last_checkpoints`` then lists the directory.

        After a save or restore this call has no effect.
        """
        for path in checkpoint_paths:
            if self._series is None and (found := _layout.find_checkpoint(path)) is not None:
                self._series = _layout.series_of(found)


def import_meta_graph(
    meta_graph_or_file: str,
    clear_devices: bool = False,
    import_scope: str | None = None,
    **saver_options: Any,
) -> Saver:
    """Returns a Saver of the default graph, which the program has built: a checkpoint holds no graph.

    A graph consists of JAX functions. So the name of the file only names the checkpoint that lies
    beside it in TensorFlow.

    Args:
        meta_graph_or_file: path of a checkpoint with ``.meta`` at its end.
        clear_devices: not needed.
        import_scope: must be None.
        **saver_options: further arguments of ``Saver``.

    Raises:
        OSError: there is no such checkpoint.
        ValueError: the default graph has no variables, or ``import_scope`` is given.
    """
    path = str(meta_graph_or_file).removesuffix(".meta")
    if not checkpoint_exists(path):
        raise OSError(f"File {meta_graph_or_file} does not exist.")
    if import_scope or not get_default_graph().variables():
        raise ValueError(
            "import_meta_graph: a checkpoint holds values, and no graph, which is JAX functions: "
            "build the model first, by the function that training calls"
        )
    return Saver(**saver_options)


class CheckpointReader(_reader.CheckpointReader):
    """``harness.load_checkpoint``, with shapes as lists.

    Args:
        ckpt_dir_or_file: a checkpoint, or a directory of checkpoints, of which the newest is taken.

    Raises:
        ValueError: there is no checkpoint.
        DataLossError: it is damaged.
    """

    def __init__(self, ckpt_dir_or_file: str) -> None:
        super().__init__(_reader.path_of(ckpt_dir_or_file))

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:  # type: ignore[override]
        """Returns the shapes by name."""
        return {name: list(shape) for name, shape in super().get_variable_to_shape_map().items()}

    def get_variable_to_dtype_map(self) -> dict[str, DType]:
        """Returns the numpy dtype of each array by name; ``object`` for strings."""
        return {name: canonical_dtype(stored.dtype) for name, stored in self.arrays.items()}

    def has_tensor(self, name: str) -> bool:
        """Returns True if there is an array of this name."""
        return name.removesuffix(":0") in self.arrays

    def debug_string(self) -> str:
        """Returns a line for each array: name, dtype and shape."""
        return "".join(f"{s.name} {s.dtype} {list(s.shape)}\n" for s in self.arrays.values())


@dataclass(frozen=True)
class CheckpointState:
    """The checkpoints of a directory, as TF1's CheckpointState.

    Attributes:
        model_checkpoint_path: path of the newest checkpoint.
        all_model_checkpoint_paths: paths of all checkpoints, oldest first.
    """

    model_checkpoint_path: str
    all_model_checkpoint_paths: list[str]


def get_checkpoint_state(
    checkpoint_dir: str, latest_filename: str | None = None
) -> CheckpointState | None:
    """Returns the checkpoints in a directory, or None when there is none.

    Args:
        checkpoint_dir: log directory, or directory of one series.
        latest_filename: not used, as the directory itself shows its checkpoints.
    """
    newest = _layout.latest_checkpoint(checkpoint_dir)
    if newest is None:
        return None
    steps = _layout.steps_in(_layout.series_of(newest))
    return CheckpointState(newest, [step.path for _, step, _ in _layout.rank_steps(steps)])


def checkpoint_exists(checkpoint_prefix: str) -> bool:
    """Returns True if a finished checkpoint of this name exists: ``model.ckpt-3``, ``model.ckpt/3``, or a directory."""
    return _layout.find_checkpoint(str(checkpoint_prefix)) is not None


def list_variables(ckpt_dir_or_file: str) -> list[tuple[str, list[int]]]:
    """Returns (name, shape) of every variable, sorted; argument and errors are those of ``CheckpointReader``."""
    return sorted(CheckpointReader(ckpt_dir_or_file).get_variable_to_shape_map().items())


class FileWriter(_writer.FileWriter):
    """``harness.FileWriter``, with TensorFlow's order of arguments.

    Args:
        logdir: the directory, made if it is not there.
        graph: a graph to write at once.
        max_queue: taken, and without effect: 16 MiB of events may wait.
        flush_secs: how often events are flushed to disk, seconds; every 2 s by default (120 s in a
            cloud store).
        graph_def: a graph, or a GraphDef message, to write at once; ``graph`` goes before it.
        filename_suffix: end of the file names.
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        graph: Any = None,
        max_queue: int = 10,
        flush_secs: float | None = None,
        graph_def: Any = None,
        filename_suffix: str | None = None,
    ) -> None:
        super().__init__(
            logdir,
            graph_def if graph is None else graph,
            flush_secs=flush_secs,
            filename_suffix=filename_suffix,
        )
