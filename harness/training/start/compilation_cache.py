"""Compiled programs in the user's cache directory, so that a restarted task compiles nothing."""

import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path

import jax
from absl import logging

import runtime as rt
from runtime.lowlevel import check_only_ours, make_private_directory

_CACHE = "jax_compilation_cache_dir"
_CPUINFO = "/proc/cpuinfo"


def keep_compilations(logdir: str = "") -> str | None:
    """Keeps what JAX compiles in this process, and takes from there what was compiled before.

    Call it before anything is compiled, in every task, ps too. The programs lie in
    ``bellwether/programs`` below ``$XDG_CACHE_HOME``, or below ``~/.cache``, as files of JAX's own
    persistent cache. They are machine code, so the directory is one that only this user can enter.
    Tasks on different kinds of machines do not share programs. Where JAX has a cache already (the
    environment variable JAX_COMPILATION_CACHE_DIR), that cache stays, unless others can write to
    it.

    Args:
        logdir: Not used since 0.2. A warning says so.

    Returns:
        The directory of the cache; None when nothing is kept, which a warning explains.

    Examples:
        >>> import harness
        >>> directory = harness.keep_compilations()
    """
    if logdir:
        logging.warning(
            "keep_compilations(logdir) is gone: since 0.2 it keeps programs in your cache directory"
        )
    present: str | None = getattr(jax.config, _CACHE)
    try:
        if present:
            if "://" not in present:
                os.makedirs(present, mode=0o700, exist_ok=True)
                check_only_ours(Path(present))
            return present
        path = _own_directory()
        make_private_directory(path)
        kept = path / _machine_kind()
        kept.mkdir(mode=0o700, exist_ok=True)
    except (OSError, rt.PermissionDeniedError) as error:
        jax.config.update(_CACHE, None)
        logging.warning("compiled programs are not kept: %s", error)
        return None
    jax.config.update(_CACHE, str(kept))
    # Programs of a step are small and quick to compile, but there are dozens of them.
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    # XLA's own caches would put the path of the directory into the names of the entries: a home may
    # be moved.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    return str(kept)


def _own_directory() -> Path:
    """Returns the directory of this user's programs.

    Raises:
        PermissionDeniedError: The user has no home, as in a container whose user has no account.
    """
    parent = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~/.cache")
    if not parent.startswith("/") and home.startswith("~"):
        raise rt.PermissionDeniedError(
            "this user has no home: set XDG_CACHE_HOME to a directory of this user's"
        )
    # Downloads, which need not be private, lie beside.
    return Path(
        os.path.realpath(parent if parent.startswith("/") else home), "bellwether", "programs"
    )


def _machine_kind() -> str:
    """Returns a name of the kind of machine; a machine of another kind may lack instructions."""
    kind = [platform.machine(), jax.__version__, metadata.version("jaxlib")]
    try:
        with open(_CPUINFO, encoding="utf-8") as lines:
            kind += [next((line for line in lines if line.startswith(("flags", "Features"))), "")]
    except OSError:
        # Other systems than Linux have no such file.
        kind += [platform.processor()]
    return hashlib.sha256("\n".join(kind).encode()).hexdigest()[:12]
