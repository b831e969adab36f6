"""The guard of one task, which ends the task's whole process tree whatever happens.

`harness.launch.tasks.start_guarded` starts the guard as a script, with the standard library only.
So the guard starts in milliseconds and needs little memory. The guard of a forked task is a fork
itself (`harness.launch.fork_server`):

    python -I -S guard.py LAUNCHER_PID COMMAND...

The guard starts COMMAND in a new process group, and passes SIGINT, SIGTERM and SIGHUP on to that
group. It ends as COMMAND ended, with the same exit code or by the same signal. Before its end it
kills every process that COMMAND left behind. A process that moved to a session of its own is among
them, because a child subreaper inherits orphans.

If the launcher dies, by `kill -9` too, the kernel tells the guard (PR_SET_PDEATHSIG). If the guard
is killed, the kernel kills COMMAND. Off Linux there is neither prctl(2) nor /proc. There only the
process group is ended, by a living guard.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from typing import NoReturn

KILL_SIGNAL = signal.SIGUSR2
"""Asks the guard to SIGKILL everything at once; SIGKILL itself would not let it clean up."""
CANNOT_START = 127
WATCHED = frozenset({signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, KILL_SIGNAL})
PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Makes this process the parent of all orphans below, so that ``end_children`` reaches them."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children() -> None:
    """Kills and reaps every child of this process, until there is none left, adopted orphans included."""
    while children := _child_ids():
        for pid in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def main(launcher: int, command: list[str]) -> NoReturn:
    """Runs `command` until the command or the process `launcher` ends. Never returns."""
    become_guard(launcher)
    try:
        # Python ignores these signals. A fresh program expects their default.
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
    os._exit(CANNOT_START)


def become_guard(launcher: int) -> None:
    """Forks the task, and guards the task until the task or the process `launcher` ends.

    Returns in the task alone.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    become_subreaper()
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # The launcher may have died before the prctl above: then the kernel sends no signal.
    if os.getppid() != launcher:
        os._exit(1)
    guard = os.getpid()
    task = os.fork()
    if task == 0:
        os.setpgid(0, 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        return
    # Guard and task both set the group, so that it exists whichever runs first.
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(task, task)
    # A task that is not reaped keeps its number, which signals need.
    while os.waitid(os.P_PID, task, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        signum = signal.sigwait(WATCHED)
        if signum == KILL_SIGNAL or os.getppid() != launcher:
            signal_group(task, signal.SIGKILL)
        elif signum == signal.SIGCHLD:
            _reap_orphans(task)
        else:
            signal_group(task, signum)
    # Not reaped yet, so its number cannot have been given to another group.
    signal_group(task, signal.SIGKILL)
    _, status = os.waitpid(task, 0)
    end_children()
    _end_as(os.waitstatus_to_exitcode(status))


def _end_as(returncode: int) -> NoReturn:
    """Ends this process the way the task ended."""
    if returncode >= 0:
        os._exit(returncode)
    # The task has written its core file, if any. A core file of the guard would overwrite that.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -returncode not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-returncode, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.kill(os.getpid(), -returncode)
    os._exit(128 - returncode)


def signal_group(group: int, signum: int) -> None:
    """Sends a signal to a process group. Does nothing when the group has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)


def _reap_orphans(task: int) -> None:
    """Reaps adopted processes that ended, so that no zombies gather while the task runs."""
    for pid in _child_ids():
        if pid != task:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _child_ids() -> list[int]:
    """Returns the ids of this process's children, zombies included.

    There are none without /proc.
    """
    me = os.getpid()
    with contextlib.suppress(FileNotFoundError):
        return [
            pid
            for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
            if _parent_id(pid) == me
        ]
    return []


def _parent_id(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The name, in brackets, may hold anything; after its closing bracket come the state and
            # the parent.
            return int(stat.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def prctl(option: int, value: int) -> None:
    """Makes the system call of the same name. Does nothing off Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
