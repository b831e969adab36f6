"""MonitoredTrainingSession: a monitored session with the usual hooks for the chief and the other workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

import runtime as rt
from harness.training.grace_period import STOP_GRACE_SECS
from harness.training.hooks.base import SessionRunHook
from harness.training.hooks.checkpoint import CheckpointSaverHook
from harness.training.hooks.observe import StepCounterHook, SummarySaverHook
from harness.training.monitored_session import MonitoredSession
from harness.training.scaffold import Scaffold
from harness.training.session_creator import ChiefSessionCreator, WorkerSessionCreator
from harness.training.session_manager import GIVE_UP_SECS

USE_DEFAULT: Final = object()
"""Stands for an interval that is not given; setting the other of a pair turns it off."""
_SAVE_SECS = 600
_SUMMARY_STEPS = 100


def MonitoredTrainingSession(  # noqa: N802 - TF1's name of a function
    master: str = "",
    is_chief: bool = True,
    checkpoint_dir: str | None = None,
    scaffold: Scaffold | None = None,
    hooks: Sequence[SessionRunHook] | None = None,
    chief_only_hooks: Sequence[SessionRunHook] | None = None,
    save_checkpoint_secs: Any = USE_DEFAULT,
    save_summaries_steps: Any = USE_DEFAULT,
    save_summaries_secs: Any = USE_DEFAULT,
    config: rt.SessionConfig | None = None,
    stop_grace_period_secs: float = STOP_GRACE_SECS,
    log_step_count_steps: int | None = 100,
    max_wait_secs: float = GIVE_UP_SECS,
    save_checkpoint_steps: Any = USE_DEFAULT,
    summary_dir: str | None = None,
    save_graph_def: bool = True,
) -> MonitoredSession:
    """Makes a monitored session for training.

    Args:
        master: session target.
        is_chief: whether this task initialises, saves and summarises; the others wait for it and get ``hooks`` only.
        checkpoint_dir: directory of the checkpoints; None for none.
        scaffold: what makes the model ready.
        hooks: called on every task.
        chief_only_hooks: called on the chief, before all others.
        save_checkpoint_secs: seconds between checkpoints, 600 when neither this nor ``save_checkpoint_steps`` is given.
        save_summaries_steps: global steps between summaries, 100 when neither this nor ``save_summaries_secs`` is.
        save_summaries_secs: seconds between summaries.
        config: session options; without device filters absent tasks that are not needed block nobody.
        stop_grace_period_secs: seconds that threads, steps and other tasks have to end after a stop.
        log_step_count_steps: global steps between step rates; None for none.
        max_wait_secs: how long to wait for the model.
        save_checkpoint_steps: global steps between checkpoints.
        summary_dir: directory of the events; ``checkpoint_dir`` by default.
        save_graph_def: whether the graph is written beside the checkpoints.

    Raises:
        ValueError: both intervals of the checkpoints were given.
        RuntimeError: the hooks need a global step and there is none.
    """
    save_summaries_steps, save_summaries_secs = _pair(save_summaries_steps, save_summaries_secs, (_SUMMARY_STEPS, None))
    save_checkpoint_secs, save_checkpoint_steps = _pair(save_checkpoint_secs, save_checkpoint_steps, (_SAVE_SECS, None))
    scaffold = scaffold or Scaffold()
    if not is_chief:
        creator = WorkerSessionCreator(scaffold, master, config, max_wait_secs)
        return MonitoredSession(creator, hooks, stop_grace_period_secs)
    if save_checkpoint_secs and save_checkpoint_steps:
        raise ValueError("Can not provide both every_secs and every_steps for checkpoints: leave one of the two out")
    all_hooks: list[SessionRunHook] = list(chief_only_hooks or ())
    checkpoint_dir = rt.lowlevel.storage.absolute(os.fspath(checkpoint_dir)) if checkpoint_dir else None
    summary_dir = summary_dir or checkpoint_dir
    if summary_dir:
        if log_step_count_steps:
            all_hooks.append(StepCounterHook(log_step_count_steps, output_dir=summary_dir))
        if save_summaries_steps or save_summaries_secs:
            all_hooks.append(
                SummarySaverHook(
                    save_summaries_steps or None, save_summaries_secs or None, summary_dir, scaffold=scaffold
                )
            )
    if checkpoint_dir and (save_checkpoint_secs or save_checkpoint_steps):
        all_hooks.append(
            CheckpointSaverHook(
                checkpoint_dir,
                save_checkpoint_secs or None,
                save_checkpoint_steps or None,
                scaffold=scaffold,
                save_graph_def=save_graph_def,
            )
        )
    all_hooks.extend(hooks or ())
    chief = ChiefSessionCreator(scaffold, master, config, checkpoint_dir, max_wait_secs=max_wait_secs)
    return MonitoredSession(chief, all_hooks, stop_grace_period_secs)


def _pair(first: Any, second: Any, default: tuple[Any, Any]) -> tuple[Any, Any]:
    if first is USE_DEFAULT and second is USE_DEFAULT:
        return default
    return (None if first is USE_DEFAULT else first), (None if second is USE_DEFAULT else second)
