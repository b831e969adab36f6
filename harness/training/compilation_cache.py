"""Compiled programs kept in the log directory, so that a task that starts again compiles nothing."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib import metadata

import jax
from absl import logging

import runtime as rt
from harness.training.sealed_files import SCHEME, key_name, others_can_write

DIRECTORY = "compilations"
_CACHE = "jax_compilation_cache_dir"
_CPUINFO = "/proc/cpuinfo"


def keep_compilations(logdir: str) -> str | None:
    """Has JAX keep what it compiles in this process below ``logdir``, and take from there what was compiled before.

    Call it before anything is compiled, in every task, ps too. What is kept is machine code. So it is kept only where
    nobody but this user can write, and each file is sealed with a key of the user's, which is drawn when there is none
    (``~/.local/state/bellwether/compilations.key``, or below ``XDG_STATE_HOME``). What has no such seal is compiled
    again. Where JAX has a compilation cache already (the environment variable JAX_COMPILATION_CACHE_DIR), that one
    stays, with files that have no seal; where others can write to it, nothing is kept.

    Args:
        logdir: of the run, on a disk of this host or a shared one. Tasks on different kinds of machines do not meet,
            nor do those of different keys.

    Returns:
        The directory of the cache; None when nothing is kept, which a warning explains.
    """
    present: str | None = getattr(jax.config, _CACHE)
    if present:
        if "://" in present or (problem := _shared(present)) is None:
            logging.debug("compiled programs are kept in %s, as JAX was told before", present)
            return present
        jax.config.update(_CACHE, None)
        logging.warning("compiled programs are not kept in %s, which JAX was told to use: %s", present, problem)
        return None
    try:
        path = os.path.realpath(os.path.join(logdir, DIRECTORY, f"{_kind_of_machine()}-{key_name()}"))
        problem = _shared(path)
    except rt.PermissionDeniedError as error:
        problem = error.message
    if problem is not None:
        logging.warning("compiled programs are not kept: %s", problem)
        return None
    jax.config.update(_CACHE, f"{SCHEME}{path}")
    # Programs of a step are small and quick to compile, but there are dozens of them.
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    # XLA's own caches would put the path of the directory into the names of the entries: a log directory may be moved.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    return path


def _shared(directory: str) -> str | None:
    """Why a directory, which is made if it is not there, is no place for machine code; None when it is one."""
    try:
        for part in (os.path.dirname(directory), directory):
            os.makedirs(part, mode=0o700, exist_ok=True)
        return others_can_write(os.path.realpath(directory))
    except OSError as error:
        return str(error)


def _kind_of_machine() -> str:
    """The same for two machines that can run each other's code: one CPU may lack instructions of another."""
    kind = [platform.machine(), jax.__version__, metadata.version("jaxlib")]
    try:
        with open(_CPUINFO, encoding="utf-8") as lines:
            kind += [next((line for line in lines if line.startswith(("flags", "Features"))), "")]
    except OSError:  # another system than Linux
        kind += [platform.processor()]
    return hashlib.sha256("\n".join(kind).encode()).hexdigest()[:12]
