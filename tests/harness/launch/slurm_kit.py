"""A real Slurm of two hosts for tests (tests/tools/slurm_two_hosts.sh), and jobs of the scripts in configs/."""

import contextlib
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

import psutil

from tests.kit import real_mnist, waits

ROOT = pathlib.Path(__file__).resolve().parents[3]
TIMEOUT_SECS = 150.0
"""How long waits last: many times what the slowest needs on a machine that has other work too."""
_NEEDED = ("slurmctld", "slurmd", "munged", "srun", "ip", "unshare", "nsenter")
_POLL_SECS = 0.1
until = functools.partial(waits.until, secs=TIMEOUT_SECS, every=_POLL_SECS)


def why_no_slurm() -> str:
    """Why there is no Slurm of two hosts here, or an empty string."""
    if os.geteuid():
        return "only root can make hosts of namespaces"
    if missing := [name for name in _NEEDED if shutil.which(name) is None]:
        return f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge iproute2"
    tried = subprocess.run(
        [
            "unshare",
            "--mount",
            "--pid",
            "--net",
            "--uts",
            "--fork",
            "mount",
            "-t",
            "tmpfs",
            "tmpfs",
            "/mnt",
        ],
        capture_output=True,
        text=True,
    )
    return f"namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


class Slurm:
    """The cluster: a controller, and the hosts n1 (which has GPUs) and n2. A context manager.

    Args:
        shared: directory that the hosts share with the test.
    """

    def __init__(self, shared: pathlib.Path) -> None:
        self.shared = shared
        seen = {
            ROOT,
            shared,
            pathlib.Path(sys.prefix).resolve(),
            pathlib.Path(sys.base_prefix).resolve(),
        }
        if real_mnist.DIRECTORY:
            seen.add(pathlib.Path(real_mnist.DIRECTORY))
        binds = [argument for path in sorted(seen) for argument in ("--bind", str(path))]
        self._log = open(shared / "slurm.log", "w+")
        self._popen = subprocess.Popen(
            # which ends when its input does
            [str(ROOT / "tests/tools/slurm_two_hosts.sh"), *binds, "cat"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )
        self._inside = until(self._controller, "Slurm is up")

    def _controller(self) -> int | None:
        """The process on the controller that waits for the end."""
        assert self._popen.poll() is None, (self.shared / "slurm.log").read_text()
        for process in psutil.Process(self._popen.pid).children(recursive=True):
            try:
                if process.cmdline() == ["cat"]:
                    return process.pid
            except psutil.Error:
                continue
        return None

    def run(self, *command: str, env: Mapping[str, str] | None = None, check: bool = True) -> str:
        """Runs a command on the controller, in the checkout; gives what it prints, without the last newline."""
        inside = [
            "nsenter",
            f"--target={self._inside}",
            *"--mount --pid --net --uts --root --wd".split(),
        ]
        done = subprocess.run(
            [*inside, *command], env={**os.environ, **(env or {})}, capture_output=True, text=True
        )
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.rstrip("\n")

    def submit(self, script: str, *flags: str, sbatch: tuple[str, ...] = (), **env: str) -> "Job":
        """Submits a script of the checkout with flags of the trainer, and options of sbatch before it."""
        directory = self.shared / f"run-{len(list(self.shared.glob('run-*')))}"
        given = {"PYTHON": sys.executable, "RUN": str(directory), **env}
        options = ("--parsable", f"--output={directory}.out", *sbatch)
        return Job(self, self.run("sbatch", *options, script, *flags, env=given), directory)

    def end_jobs(self) -> None:
        """Ends all jobs, waits until nothing of them is left on the hosts, and has every host take jobs again."""
        self.run("scancel", "--user=root")
        until(
            lambda: not self.run("squeue", "--noheader") and not self.processes("slurmstepd"),
            "all jobs are gone",
        )
        self.resume()

    def resume(self) -> None:
        """Has every host take jobs again, also one that Slurm took for gone because this machine was too busy."""
        for host in ("n1", "n2"):
            # one that does is an error
            self.run("scontrol", "update", f"NodeName={host}", "State=RESUME", check=False)

    def processes(self, text: str) -> list[psutil.Process]:
        """The processes on the hosts whose command line contains a text."""
        found = []
        for process in psutil.Process(self._popen.pid).children(recursive=True):
            try:
                if text in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def notice_within(self, secs: int) -> None:
        """Has the controller take a host for gone after so long."""
        self.run("sed", "-i", f"$ a SlurmdTimeout={secs}", "/etc/slurm/slurm.conf")
        self.run("scontrol", "reconfigure")

    def cut_power(self, host: str) -> None:
        """Ends a host without a word to anybody: no packet leaves it, and then its processes are gone."""
        (daemon,) = self.processes(f"slurmd -N {host}")
        space = os.stat(f"/proc/{daemon.pid}/ns/net").st_ino
        self._outside("ip", "link", "set", host.replace("n", "v"), "down")
        for process in psutil.Process(self._popen.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                if os.stat(f"/proc/{process.pid}/ns/net").st_ino == space:
                    process.kill()

    def power(self, host: str) -> None:
        """Brings a host back, and waits until Slurm has it."""
        self._outside("ip", "link", "set", host.replace("n", "v"), "up")
        start = f"hostname {host}; exec chroot /mnt/root slurmd -N {host}"
        self._outside(
            "nsenter", f"--net=/run/netns/{host}", "unshare", "--uts", "bash", "-c", start
        )
        until(
            lambda: self.run("sinfo", "-h", "-n", host, "-o", "%T").startswith("idle"),
            f"{host} is back",
        )

    def _outside(self, *command: str) -> None:
        """Runs a command where the hosts were made: in the namespaces of the controller, over the whole file system."""
        inside = ["nsenter", f"--target={self._inside}", *"--mount --pid --net --uts".split()]
        subprocess.run([*inside, *command], check=True, capture_output=True, text=True, cwd="/")

    def close(self) -> None:
        """Ends all that runs on the hosts, and the hosts."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.wait(TIMEOUT_SECS)
        self._log.close()


class Job:
    """A job.

    Args:
        slurm: the cluster.
        number: its job id.
        directory: its run directory.
    """

    def __init__(self, slurm: Slurm, number: str, directory: pathlib.Path) -> None:
        self.slurm, self.number, self.directory = slurm, number, directory
        self._read_from = 0

    @property
    def output(self) -> str:
        """All that it has printed."""
        path = pathlib.Path(f"{self.directory}.out")
        return path.read_text(errors="replace") if path.exists() else ""

    def expect(self, pattern: str) -> re.Match[str]:
        """Waits for a line after the one that the last call found; gives the match."""

        def look() -> re.Match[str] | None:
            text = self.output[self._read_from :]
            whole = text[: text.rfind("\n") + 1]
            if found := re.search(pattern, whole, re.MULTILINE):
                self._read_from += found.end()
            return found

        try:
            return until(look, pattern)
        except AssertionError:
            hosts = self.slurm.run("scontrol", "show", "nodes", "--oneliner")
            raise AssertionError(
                f"no line with {pattern!r}; {self.fields()}\n{hosts}\n{self.output[-6000:]}"
            ) from None

    def fields(self) -> dict[str, str]:
        """What ``scontrol show job`` says, of the first group of a heterogeneous job."""
        told = self.slurm.run("scontrol", "show", "job", self.number.partition(".")[0]).split(
            "\n\n"
        )[0]
        return dict(pair.split("=", 1) for pair in told.split() if "=" in pair)

    def state(self) -> str:
        """Such as RUNNING."""
        return self.fields()["JobState"]

    def wait(self, *states: str) -> None:
        """Waits until it is in one of the states."""
        try:
            until(lambda: self.state() in states, f"job {self.number} is {' or '.join(states)}")
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.fields()}\n{self.output[-6000:]}") from None

    def task(self, name: str) -> psutil.Process:
        """The process that is a task, such as "ps/0", neither its launcher nor its guard."""
        job, _, index = name.partition("/")

        def look() -> psutil.Process | None:
            for process in self.slurm.processes(f"--job_name={job} --task_index={index}"):
                if not any(
                    "harness.launch" in word or word.endswith("guard.py")
                    for word in process.cmdline()
                ):
                    return process
            return None

        return until(look, f"{name} runs")

    def host(self, name: str) -> str:
        """The host on which a task runs."""
        return self.task(name).environ()["SLURMD_NODENAME"]
