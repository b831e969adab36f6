"""The fork server: a process that has imported what tasks import, and forks tasks.

A Python task spends most of its start on the imports of JAX, the runtime and the harness.
`harness.launch.forks` starts this file once, as a script:

    python fork_server.py FD FIRST_PATH BLANKS

FD is a Unix socket to the launcher, FIRST_PATH the first entry of the tasks' `sys.path`. BLANKS make
room for the command line of a task in the list of processes. The server starts no thread and no
backend of JAX, so a task begins with imported modules and nothing else.

A start takes four steps:

1. The launcher sends the command line and the variables of a task, a socket and the output.
2. The server forks a process that forks the guard and ends. So the guard becomes a child of the
   launcher, the nearest subreaper, and guards as `harness.launch.guard` says.
3. The server sends the process id of the guard through the socket, and the launcher answers. A
   guard without an answer ends, so no task runs unknown to the launcher.
4. The guard forks the task, which runs the program as a new interpreter would.
"""

import contextlib
import copy
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import types
from collections.abc import Sequence
from importlib import abc, machinery
from typing import Any

MESSAGE_BYTES = 1 << 17
READY = b"ready"
_FIRST = ("absl.app", "numpy", "harness.exit_codes", "harness.launch.tasks")
"""Modules that a program imports without JAX."""
_LATE = ("jax", "jaxlib", "optax", "runtime", "harness")
"""Packages whose other modules the program finds imported only while its environment is that of its start."""
_M_MMAP_THRESHOLD = -3
"""The option of mallopt(3) that MALLOC_MMAP_THRESHOLD_ sets at the start of a program."""


class _ImportedModules(abc.MetaPathFinder, abc.Loader):
    """The modules that import JAX, hidden from the program until the program imports one of them.

    A program may set a variable such as JAX_ENABLE_X64 before the program imports JAX. JAX has read
    the variable already, so the task then restarts as an ordinary process.
    """

    def __init__(self) -> None:
        """Imports the modules. The variables that they set are set for a program that imports them."""
        before = dict(os.environ)
        for name in _FIRST:
            importlib.import_module(name)
        first = set(sys.modules)
        for name in (*_LATE, *sorted(set(sys.modules["harness"]._HOMES.values()))):
            importlib.import_module(name)
        self._modules = {
            name: module
            for name, module in sys.modules.items()
            if name not in first and name.partition(".")[0] in _LATE
        }
        self._specs = {name: module.__spec__ for name, module in self._modules.items()}
        self._set = {name: os.environ.pop(name) for name in set(os.environ) - set(before)}

    def hide(self, command: list[str]) -> None:
        """Hides the modules from the program of a command line."""
        self._command, self._environ, self._directory = command, dict(os.environ), os.getcwd()
        for name in self._modules:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> machinery.ModuleSpec | None:
        spec = copy.copy(self._specs.get(fullname))
        if spec is not None:
            spec.loader = self
        return spec

    def create_module(self, spec: machinery.ModuleSpec) -> types.ModuleType:
        if os.environ != self._environ:
            os.chdir(self._directory)
            os.execvpe(self._command[0], self._command, self._environ)
        return self._modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """Shows all modules to the program."""
        module.__spec__ = self._specs[module.__name__]
        sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        os.environ.update({**self._set, **os.environ})


def _serve(control: socket.socket) -> list[str]:
    """Forks tasks until the launcher ends. Returns in a task alone, with the command line."""
    assert len(sys._current_frames()) == 1, "a fork has one thread only"
    control.send(READY)
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
        if not data:
            os._exit(0)
        assert len(descriptors) == 2, "a socket and the output"
        with contextlib.closing(socket.socket(fileno=descriptors[0])) as launcher:
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                control.close()
                os.dup2(descriptors[1], 1)
                os.dup2(descriptors[1], 2)
                for descriptor in (reader, descriptors[1]):
                    os.close(descriptor)
                if guarded := os.fork():
                    os.write(writer, str(guarded).encode())
                    os._exit(0)
                os.close(writer)
                message = json.loads(data)
                _become_task(message, launcher)
                return list(message["argv"])
            os.close(descriptors[1])
            os.close(writer)
            os.waitpid(pid, 0)
            with open(reader, "rb") as answer, contextlib.suppress(OSError):
                launcher.send(answer.read())


def _become_task(message: dict[str, Any], launcher: socket.socket) -> None:
    """Turns a fork of the server into the guard, and the fork of the guard into the task."""
    os.setsid()
    if launcher.recv(MESSAGE_BYTES) != READY:
        os._exit(1)
    # A sandbox may have no /proc, or refuse the affinity.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(message["launcher"]))
        _show_command([sys.executable, guard.__file__, str(message["launcher"]), *message["argv"]])
    guard.become_guard(message["launcher"])
    environ = message["env"]
    os.environ.update(environ)
    if "JAX_PLATFORMS" in environ:
        sys.modules["jax"].config.update("jax_platforms", environ["JAX_PLATFORMS"])
    if "MALLOC_MMAP_THRESHOLD_" in environ:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, int(environ["MALLOC_MMAP_THRESHOLD_"]))
    # Python seeds `random` in a fork. NumPy would draw the same numbers in all tasks.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    with contextlib.suppress(OSError):
        _show_command(message["argv"])


def _show_command(command: Sequence[str]) -> None:
    """Shows a command line in place of the server's in the list of processes."""
    with open("/proc/self/stat", "rb") as stat:
        # The name, in brackets, may hold anything. The two fields are numbers 48 and 49.
        fields = stat.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    line = "".join(f"{word}\0" for word in command).encode(errors="surrogateescape")
    if 0 < start < start + len(line) <= end:
        ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def _run_program(command: list[str]) -> None:
    """Runs the module or the file of a command line as the main program of this process."""
    sys.orig_argv = command
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    vars(program).update(__builtins__=sys.modules["builtins"], __annotations__={})
    if command[1] == "-m":
        sys.argv = command[1:2] + command[3:]
        runpy._run_module_as_main(command[2])  # type: ignore[attr-defined]
    else:
        sys.argv = command[1:]
        path = os.path.abspath(command[1])
        loader = machinery.SourceFileLoader("__main__", path)
        vars(program).update(__file__=path, __cached__=None, __loader__=loader)
        exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), vars(program))


if __name__ == "__main__":
    # The directory of this file has modules with general names.
    if not sys.flags.safe_path:
        sys.path[0] = sys.argv[2]
    from harness.launch import guard

    guard.prctl(guard.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_BLOCK, guard.WATCHED)
    _modules = _ImportedModules()
    gc.freeze()
    _command = _serve(socket.socket(fileno=int(sys.argv[1])))
    _modules.hide(_command)
    try:
        _run_program(_command)
    except BaseException as error:
        # Tracebacks show the program alone, without the two frames of this file.
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            error.__traceback__ = error.__traceback__.tb_next.tb_next
        raise
