r"""The content of a checkpoint: `python -m harness.inspect_checkpoint DIR [--name=w] [--values] [--compare OTHER]`.

DIR is a run's directory, a series of checkpoints (``logdir/model.ckpt``) or one checkpoint
(``logdir/model.ckpt/100``). Shows the steps that there are and whether each is complete, then the
variables of the newest whole one (or of the one named): dtype, shape, bytes, and the tasks that
held them. The files of the checkpoint whose variables are shown are compared with their checksums;
with --verify those of all steps, otherwise only the sizes of their files count. The exit code is 0
when all is well, 1 when a checkpoint is damaged, none is there, or --compare finds a difference, 2
for bad arguments.
"""

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

import runtime as rt
from harness import exit_codes
from harness.checkpoints import layout
from harness.checkpoints.layout import find_checkpoint, managers_below, problems_of, steps_in
from harness.checkpoints.manifest import (
    CheckpointManifest,
    StoredArray,
    all_problems,
    read_manifest,
)
from harness.checkpoints.reader import CheckpointReader, load_checkpoint
from harness.command_line import ToolParser
from harness.monitoring.rates import sizes, table
from runtime.lowlevel import durability, storage


def steps_of(path: str, *, verify: bool = False) -> list[dict[str, Any]]:
    """Returns the checkpoints at or right below a directory: step, path, time of the save, problems.

    Args:
        path: the directory.
        verify: True compares all files with their checksums.
    """
    found = []
    for directory in managers_below(path):
        for step in steps_in(directory):
            try:
                manifest = read_manifest(step.path)
            # Below, `problems_of` reads the manifest once more and names the damage.
            except rt.DataLossError:
                manifest = None
            problems = problems_of(step) + _label_problems(step.path, manifest)
            # Files of a wrong size need no checksum.
            if verify and manifest is not None and not problems:
                problems = all_problems(step.path, manifest)
            found.append(
                {
                    "step": step.number,
                    "path": step.path,
                    "saved_at": manifest.saved_at if manifest else None,
                    "bytes": sum(f.size for f in manifest.files) if manifest else None,
                    "complete": not problems,
                    "problems": problems,
                    "with_nan": manifest.nan_text if manifest else "",
                }
            )
    return found


def _label_problems(path: str, manifest: CheckpointManifest | None) -> list[str]:
    """Returns the problems of the file that Orbax writes last, after the manifest.

    A restore does not need this file. But Orbax, and programs that copy checkpoints, take it as the
    sign of a whole checkpoint.
    """
    if not storage.is_local(path):
        return []
    try:
        text = layout.text_of(epath.Path(path) / layout.ORBAX_STEP_FILE)
        whole = isinstance(json.loads(text), dict)
    except FileNotFoundError:
        # Checkpoints of other programs may have no such file.
        return [f"{layout.ORBAX_STEP_FILE}: No such file or directory"] if manifest else []
    except OSError as error:
        durability.raise_if_barred(error, path)
        return [f"{layout.ORBAX_STEP_FILE}: {error.strerror}"]
    except (ValueError, RecursionError):
        whole = False
    return [] if whole else [f"{layout.ORBAX_STEP_FILE}: is not the JSON that Orbax wrote"]


def wanted_arrays(reader: CheckpointReader, name: str | None) -> list[StoredArray]:
    """Returns the arrays of ``--name``, or all arrays without that flag."""
    return [
        s
        for s in reader.arrays.values()
        if name is None or s.name == name or s.name.startswith(f"{name}/")
    ]


def tasks_of(stored: StoredArray) -> list[str]:
    """Returns the tasks that held a variable at the save."""
    return list(dict.fromkeys(task for task, _, _ in stored.slices))


def compare_checkpoints(
    one: CheckpointReader, other: CheckpointReader, name: str | None = None
) -> list[str]:
    """Returns a line for each variable that differs between two checkpoints, sorted."""
    ours = {s.name: s for s in wanted_arrays(one, name)}
    theirs = {s.name: s for s in wanted_arrays(other, name)}
    lines = [f"{n}: only in {one.path}" for n in ours.keys() - theirs.keys()]
    lines += [f"{n}: only in {other.path}" for n in theirs.keys() - ours.keys()]
    for shared in ours.keys() & theirs.keys():
        a, b = ours[shared], theirs[shared]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            lines.append(f"{shared}: {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}")
            continue
        x, y = one.get_tensor(shared), other.get_tensor(shared)
        # As bytes, because a NaN is unequal to itself.
        if x.tobytes() == y.tobytes() if a.dtype != "string" else x.tolist() == y.tolist():
            continue
        count = int(np.sum(x != y))
        largest = ""
        if a.dtype not in ("string", "bool"):
            # In a wide type: unsigned numbers would wrap around.
            gap = np.abs(x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) - y)
            largest = f", by up to {float(np.nanmax(gap)):.6g}"
        lines.append(f"{shared}: {count} of {x.size} elements differ{largest}")
    return sorted(lines, key=lambda line: line.partition(": ")[0])


def _make_parser() -> ToolParser:
    parser = ToolParser("harness.inspect_checkpoint", __doc__ or "")
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="of a run, of a series of checkpoints, or of one checkpoint",
    )
    parser.add_argument(
        "--name", help="only the variable of this name, or those whose names begin with it and a /"
    )
    parser.add_argument("--values", action="store_true", help="print the values")
    parser.add_argument(
        "--verify", action="store_true", help="compare the files of all steps with their checksums"
    )
    parser.add_argument("--compare", metavar="OTHER", help="another checkpoint: print what differs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    return parser


@exit_codes.printing()
def main(argv: Sequence[str] | None = None) -> int:
    """Prints the checkpoints that the arguments name; returns the exit code."""
    options = _make_parser().parse_args(argv)
    path = options.directory
    # The file system knows nothing of a place in a store.
    if "://" not in path and not os.path.isdir(path) and find_checkpoint(path) is None:
        print(
            f"harness.inspect_checkpoint: {path}: no such directory or checkpoint", file=sys.stderr
        )
        return exit_codes.CONFIGURATION.plain
    steps = steps_of(path, verify=options.verify)
    try:
        reader = _open_newest(path, steps)
        other = load_checkpoint(options.compare) if options.compare else None
        if other is not None:
            # Damage of the other checkpoint would look like a difference.
            other.verify()
    except (ValueError, rt.DataLossError) as error:
        if options.json:
            print(json.dumps({"steps": steps, "checkpoint": None, "variables": []}))
        else:
            _show_steps(steps)
        print(f"harness.inspect_checkpoint: {error}", file=sys.stderr)
        return 1
    try:
        return _show_checkpoint(reader, other, steps, options)
    except rt.DataLossError as error:
        # Another program's checkpoint has no checksums, so only reading a value shows damage.
        print(f"harness.inspect_checkpoint: {error}", file=sys.stderr)
        return 1


def _show_checkpoint(
    reader: CheckpointReader,
    other: CheckpointReader | None,
    steps: list[dict[str, Any]],
    options: argparse.Namespace,
) -> int:
    if other is not None:
        lines = compare_checkpoints(reader, other, options.name)
        print("\n".join(lines) or f"no difference between {reader.path} and {other.path}")
        return 1 if lines else 0
    shown = wanted_arrays(reader, options.name)
    if options.name and not shown:
        print(f"harness.inspect_checkpoint: {reader.path} has no {options.name!r}", file=sys.stderr)
        return 1
    if options.json:
        print(
            json.dumps(
                {
                    "steps": steps,
                    "checkpoint": reader.path,
                    "variables": [_describe_array(reader, s, options) for s in shown],
                }
            )
        )
    else:
        _show_steps(steps)
        _show_variables(reader, shown, options)
    # The path names one checkpoint, which no table of steps has listed with its problems.
    if not steps and (problems := _label_problems(reader.path, reader.manifest)):
        print(
            f"harness.inspect_checkpoint: {reader.path} is damaged: {problems[0]}", file=sys.stderr
        )
        return 1
    return 0 if all(step["complete"] for step in steps) else 1


def _open_newest(path: str, steps: list[dict[str, Any]]) -> CheckpointReader:
    """Opens the newest undamaged checkpoint, with its files compared.

    Problems of newer checkpoints are added to ``steps``.
    """
    known = {step["path"]: step for step in steps}
    for step in layout.newest_first(path) if steps else []:
        # Sizes show this damage, so no file is read.
        if problems_of(step):
            continue
        try:
            reader = CheckpointReader(step.path)
            problems = reader.problems
        except rt.DataLossError as error:
            problems = [error.message]
        if not problems:
            return reader
        if step.path in known:
            known[step.path].update(complete=False, problems=problems)
    # The path names one checkpoint, or no step is whole: then the newest one raises its error.
    reader = load_checkpoint(path)
    reader.verify()
    return reader


def _describe_array(
    reader: CheckpointReader, stored: StoredArray, options: argparse.Namespace
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": stored.name,
        "dtype": stored.dtype,
        "shape": list(stored.shape),
        "bytes": stored.nbytes,
        "tasks": tasks_of(stored),
    }
    if options.values:
        value = reader.get_tensor(stored.name)
        found["value"] = (
            [str(v) for v in value.ravel().tolist()] if value.dtype.hasobject else value.tolist()
        )
    return found


def _show_steps(steps: list[dict[str, Any]]) -> None:
    rows = [["STEP", "SAVED", "BYTES", "STATE", "PATH"]]
    for step in steps:
        at = step["saved_at"]
        when = "" if at is None else datetime.datetime.fromtimestamp(at).isoformat(" ", "seconds")
        # Three problems show the kind of damage; --json has all.
        state = "complete" if step["complete"] else "DAMAGED: " + "; ".join(step["problems"][:3])
        if step["with_nan"]:
            state += f", NaN in {step['with_nan']}"
        rows.append(
            [
                str(step["step"]),
                when,
                "" if step["bytes"] is None else sizes(step["bytes"]),
                state,
                step["path"],
            ]
        )
    if steps:
        print(table(rows) + "\n")


def _show_variables(
    reader: CheckpointReader, shown: list[StoredArray], options: argparse.Namespace
) -> None:
    rows = [["VARIABLE", "DTYPE", "SHAPE", "BYTES", "TASKS"]]
    for stored in shown:
        tasks = ", ".join(tasks_of(stored))
        rows.append(
            [stored.name, stored.dtype, str(list(stored.shape)), sizes(stored.nbytes), tasks]
        )
    print(f"{reader.path}: {len(shown)} variables, {sizes(sum(s.nbytes for s in shown))}")
    print(table(rows))
    if options.values:
        with np.printoptions(threshold=1000, linewidth=120, precision=6):
            for stored in shown:
                print(f"\n{stored.name}\n{reader.get_tensor(stored.name)}")
