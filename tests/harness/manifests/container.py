"""Runs a command as a container runtime does: python -I -S container.py JSON, with the words of ``main``.

The command has process numbers, a host name, a root directory, a user and an environment of its
own. It is process number 1, or that is a process that does nothing, where containers share their
process numbers (``shared``). SIGTERM is passed on to it; the exit code is its own, or 128 and the
number of the signal that has ended it.
"""

import ctypes
import json
import os
import signal
import socket
import sys

_NEW_MOUNTS, _NEW_NAMES, _NEW_PIDS = 0x20000, 0x4000000, 0x20000000
_PRIVATE = 0x40000 | 0x4000
_PR_SET_PDEATHSIG = 1


def main(
    host: str,
    root: str,
    user: int,
    directory: str,
    environ: dict[str, str],
    command: list[str],
    shared: bool = False,
) -> int:
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    check(libc.unshare(_NEW_MOUNTS | _NEW_NAMES | _NEW_PIDS))
    check(libc.mount(None, b"/", None, _PRIVATE, None))
    pause = os.fork() if shared else 0  # the first of the new process numbers
    if shared and pause == 0:
        check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
        os.close(1)  # whoever reads what the command writes sees its end
        os.close(2)
        while True:
            signal.pause()
    child = os.fork()
    if child == 0:
        check(libc.mount(b"proc", f"{root}/proc".encode(), b"proc", 0, None))
        socket.sethostname(host)
        os.chroot(root)
        os.chdir(directory)
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))  # another user would clear it
        os.execvpe(command[0], command, environ)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, number))
    _, status = os.waitpid(child, 0)
    if pause:
        os.kill(pause, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(**json.loads(sys.argv[1])))
