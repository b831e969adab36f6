"""The sandbox of processes that read what strangers may have made: a seccomp filter that a process gives itself.

What the filter does not allow fails with EPERM, in all threads and for good. A process can still compute, take and give
back memory, begin threads, and use the files that it has open. It can reach nothing else: no other process, no network.
What it answers to the process that has started it may still be a lie, once something hostile runs in it.

Loaded by its path too (`runtime.checkpoint.trial_program`), so this imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Mapping
from typing import Final

ALLOWED: Final[Mapping[str, str]] = {
    "memory, code that was just compiled among it": "brk mmap mremap munmap mprotect madvise membarrier",
    "threads that wait for each other": "futex futex_time64 sched_yield restart_syscall",
    "threads that begin, look at themselves and end": (
        "set_robust_list rseq gettid getpid sched_getaffinity sched_getparam sched_getscheduler getcpu exit exit_group"
    ),
    "signals of its own, such as a processor's": "rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack",
    "times": "clock_gettime clock_getres clock_nanosleep gettimeofday nanosleep time",
    "figures of itself and of the machine": "getrandom getrusage getuid geteuid getgid getegid sysinfo times uname",
    "files that it has open": "read readv pread64 preadv write writev lseek fstat close poll ppoll",
}
"""By what they are for, the system calls that a process in the sandbox may make, whatever their arguments."""
ALLOWED_TO_READERS: Final = (
    "stat lstat newfstatat fstatat64 statx readlink readlinkat access faccessat faccessat2 getdents64 getcwd fadvise64"
)
"""Those that one may make besides that reads files."""

_LIBRARY: Final = "libseccomp.so.2"
_ALLOW: Final = 0x7FFF0000
_FAIL: Final = 0x00050000
"""And the number of an error."""
_TSYNC: Final = 4
"""The attribute of a filter that says whether it holds for the threads that there are, too."""
_EQUAL, _MASKED_EQUAL = 4, 7
_CLONE_THREAD: Final = 0x00010000
_CLONE_NAMESPACES: Final = 0x7E020000
_PR_SET_NAME: Final = 15
_WRITES: Final = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC


class _Argument(ctypes.Structure):
    """What an argument of a system call has to be: ``struct scmp_arg_cmp``."""

    _fields_ = (
        ("number", ctypes.c_uint),
        ("comparison", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def _is(number: int, value: int) -> _Argument:
    return _Argument(number, _EQUAL, value, 0)


def _has(number: int, mask: int, value: int) -> _Argument:
    return _Argument(number, _MASKED_EQUAL, mask, value)


def _by_argument(reads_files: bool) -> tuple[tuple[str, tuple[_Argument, ...]], ...]:
    """The system calls that are allowed with some arguments only."""
    rules: tuple[tuple[str, tuple[_Argument, ...]], ...] = (
        ("clone", (_has(0, _CLONE_THREAD | _CLONE_NAMESPACES, _CLONE_THREAD),)),  # threads, and no processes
        ("tgkill", (_is(0, os.getpid()),)),  # abort()
        ("prlimit64", (_is(0, 0), _is(2, 0))),  # a thread asks how large its stack may be
        ("prctl", (_is(0, _PR_SET_NAME),)),
    )
    if reads_files:
        rules += (("open", (_has(1, _WRITES, os.O_RDONLY),)), ("openat", (_has(2, _WRITES, os.O_RDONLY),)))
    return rules


def confine(*, reads_files: bool = False) -> str:
    """Takes from this process and all its threads, for good, what it needs no more.

    Args:
        reads_files: it may open files for reading, and look into directories.

    Returns:
        Why it cannot be done here; empty when it is done.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return f"{_LIBRARY} cannot be loaded (Debian has it in libseccomp2)"
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = (ctypes.c_uint32,)
    library.seccomp_release.argtypes = library.seccomp_load.argtypes = (ctypes.c_void_p,)
    library.seccomp_attr_set.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32)
    library.seccomp_rule_add_array.argtypes = (
        *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint),
        ctypes.POINTER(_Argument),
    )
    made = library.seccomp_init(_FAIL | errno.EPERM)
    if not made:
        return f"{_LIBRARY} makes no filter"

    def add(action: int, name: str, arguments: tuple[_Argument, ...] = ()) -> int:
        number: int = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # this architecture has none of that name
            return 0
        code: int = library.seccomp_rule_add_array(
            made, action, number, len(arguments), (_Argument * len(arguments))(*arguments)
        )
        return code

    try:
        names = " ".join([*ALLOWED.values(), ALLOWED_TO_READERS if reads_files else ""]).split()
        codes = [library.seccomp_attr_set(made, _TSYNC, 1)]
        codes += [add(_ALLOW, name) for name in names]
        codes += [add(_ALLOW, name, arguments) for name, arguments in _by_argument(reads_files)]
        codes += [add(_FAIL | errno.ENOSYS, "clone3")]  # its flags cannot be seen: libraries go back to clone
        code = next(filter(None, codes), 0) or library.seccomp_load(made)
    finally:
        library.seccomp_release(made)
    return "the kernel takes no filter" if code else ""


def warn_without(problem: str) -> None:
    """Says, once in a process, that its children have no filter.

    Args:
        problem: why, as `confine` has told it.
    """
    from absl import logging  # not at the top: a child that is loaded by its path pays for nothing

    logging.log_first_n(
        logging.WARNING,
        "what others have made (modules, packed checkpoints) is tried out with limits of time and memory only, and "
        "without a seccomp filter: %s",
        1,
        problem,
    )
