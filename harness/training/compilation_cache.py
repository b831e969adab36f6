"""Compiled programs kept in the log directory, so that a task that starts again compiles nothing."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib import metadata

import jax
from absl import logging

DIRECTORY = "compilations"
_CACHE = "jax_compilation_cache_dir"
_CPUINFO = "/proc/cpuinfo"


def keep_compilations(logdir: str) -> str:
    """Has JAX keep what it compiles in this process below ``logdir``, and take from there what was compiled before.

    Call it before anything is compiled, in every task, ps too. Where JAX has a compilation cache already (the
    environment variable JAX_COMPILATION_CACHE_DIR), that one stays. What is kept is machine code that JAX trusts:
    nobody else may be able to write to ``logdir``.

    Args:
        logdir: of the run, on a disk of this host or a shared one. Tasks on different kinds of machines do not meet.

    Returns:
        The directory of the cache.
    """
    present: str | None = getattr(jax.config, _CACHE)
    if present:
        logging.debug("compiled programs are kept in %s, as JAX was told before", present)
        return present
    path = os.path.join(logdir, DIRECTORY, _kind_of_machine())
    jax.config.update(_CACHE, path)
    # Programs of a step are small and quick to compile, but there are dozens of them.
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    # XLA's own caches would put the path of the directory into the names of the entries: a log directory may be moved.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    return path


def _kind_of_machine() -> str:
    """The same for two machines that can run each other's code: one CPU may lack instructions of another."""
    kind = [platform.machine(), jax.__version__, metadata.version("jaxlib")]
    try:
        with open(_CPUINFO, encoding="utf-8") as lines:
            kind += [next((line for line in lines if line.startswith(("flags", "Features"))), "")]
    except OSError:  # another system than Linux
        kind += [platform.processor()]
    return hashlib.sha256("\n".join(kind).encode()).hexdigest()[:12]
