"""A Ray cluster of several hosts, each a network namespace: nodes die, others come, and training goes on.

unshare --mount --net --pid --fork --kill-child --mount-proc python -m
tests.harness.ray.nodes_program DIRECTORY

Prints the driver's lines, and "OK" at the end.
"""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil

HEAD = "10.89.0.1"
TIMEOUT_SECS = 240.0
QUICK = {  # how soon Ray takes a node that is silent for dead
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "5",
}
ENVIRONMENT = {
    **os.environ,
    **QUICK,
    "RAY_ADDRESS": f"{HEAD}:6379",
    "RAY_AUTH_MODE": "token",
    "RAY_DEDUP_LOGS": "0",
    "PYTHONUNBUFFERED": "1",
}


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=60)


def until_open(host: str, port: int) -> None:
    deadline = time.monotonic() + TIMEOUT_SECS
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"nobody listens at {host}:{port}"
            time.sleep(0.1)


class Node:
    """A host with Ray: the first one is the head, on the bridge itself."""

    def __init__(self, number: int, **resources: int) -> None:
        self.number = number
        space: tuple[str, ...] = ()
        address = f"10.89.0.{number}"
        what = (
            ["--head", "--port=6379", "--include-dashboard=false"]
            if number == 1
            else [f"--address={HEAD}:6379"]
        )
        if number > 1:
            run("ip", "netns", "add", f"h{number}")
            run(
                "ip",
                "link",
                "add",
                f"v{number}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                f"h{number}",
            )
            run("ip", "link", "set", f"v{number}", "master", "br0", "up")
            space = ("ip", "netns", "exec", f"h{number}")
            network = f"ip addr add {address}/24 dev eth0; ip link set eth0 up; ip link set lo up"
            run(*space, "sh", "-c", network)
            space += (
                "unshare",
                "--mount",
                "sh",
                "-c",
                'mount -t tmpfs tmpfs /tmp/ray; exec "$@"',
                "sh",
            )
        # It gives up after 30 s, which a busy machine may take: again, until it runs.
        again = ("sh", "-c", 'until "$@"; do echo "ray start: again" >&2; done', "sh")
        options = [
            f"--node-ip-address={address}",
            "--num-cpus=1",
            f"--resources={json.dumps(resources)}",
            "--block",
        ]
        ray = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            *what,
            *options,
            "--object-store-memory=100000000",
        ]
        self.process = subprocess.Popen(
            [*space, *again, *ray],
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def cut_power(self) -> None:
        """Ends it without a word to anybody."""
        space = os.stat(f"/proc/{self.process.pid}/ns/net").st_ino
        run("ip", "link", "set", f"v{self.number}", "down")
        for process in psutil.process_iter():
            try:
                if os.stat(f"/proc/{process.pid}/ns/net").st_ino == space:
                    process.send_signal(signal.SIGKILL)
            except (psutil.Error, OSError):
                continue
        self.process.wait()


class Driver:
    """The driver on the head, and its lines."""

    def __init__(self, logdir: pathlib.Path) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.harness.ray.ray_program",
            "nodes",
            str(logdir),
            "1000000000",
        ]
        self.process = subprocess.Popen(
            command,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.lines: list[str] = []
        self.seen = 0
        self.new = threading.Condition()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            print(line, end="", flush=True)
            with self.new:
                self.lines.append(line)
                self.new.notify_all()

    def expect(self, pattern: str) -> "re.Match[str]":
        """Waits for a line after the one that the last call found."""
        deadline = time.monotonic() + TIMEOUT_SECS
        with self.new:
            while True:
                for number in range(self.seen, len(self.lines)):
                    if found := re.search(pattern, self.lines[number]):
                        self.seen = number + 1
                        return found
                self.seen = len(self.lines)
                if not self.new.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no line with {pattern!r}")


def main(directory: pathlib.Path) -> None:
    pathlib.Path("/run/netns").mkdir(exist_ok=True)
    pathlib.Path("/tmp/ray").mkdir(exist_ok=True)
    for path in ("/run/netns", "/tmp/ray"):
        run("mount", "-t", "tmpfs", "tmpfs", path)
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "br0", "type", "bridge")
    run("ip", "addr", "add", f"{HEAD}/24", "dev", "br0")
    run("ip", "link", "set", "br0", "up")
    logdir = directory / "run"
    logdir.mkdir()

    Node(1, worker=1)
    until_open(HEAD, 6379)
    ps, other = Node(2, ps=1), Node(3, worker=1)
    driver = Driver(logdir)
    for index in (0, 1):
        driver.expect(rf"worker/{index} .*step \d+ of start 0")
    # Worker 0 may be on either node: the one that dies is not the head.
    (moved,) = {0, 1} - {
        0 if "ip=" not in line else 1 for line in driver.lines if "worker/0 " in line
    }
    stayed = 1 - moved
    other.cut_power()
    driver.expect(f"the actor of worker/{moved} is gone")
    driver.expect(rf"worker/{stayed} .*step \d+ of start 0")
    driver.expect(f"still waiting for nodes for worker/{moved}: each needs .*'worker': 1")
    Node(4, worker=1)
    driver.expect(rf"worker/{moved} .*step \d+ of start 1")
    driver.expect(rf"worker/{stayed} .*step \d+ of start 0")
    ps.cut_power()
    driver.expect("the actor of ps/0 is gone")
    Node(5, ps=1)
    driver.expect(
        r"ps/0 is on another node now, at 10\.89\.0\.5:\d+: all tasks are started again with this "
        r"address"
    )
    (logdir / "steps").write_text("1")
    results = driver.expect(r"RESULTS (.*)")[1]
    assert f"('worker/{stayed}', 1, " in results and f"('worker/{moved}', 2, " in results, results
    assert driver.process.wait(TIMEOUT_SECS) == 0
    driver.reader.join()
    print("OK", flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
