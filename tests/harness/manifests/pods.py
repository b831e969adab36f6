"""Pods without Kubernetes: processes with a network, a name and process numbers of their own, as a manifest says.

They run over a private copy of the file system, as the user of the manifest, with the manifest's
command, its environment and nothing else. The names of pods are in a file of names. A kubelet's
rules, with their source:

* a pod is ended by preStop, SIGTERM to its first process, and SIGKILL after
  terminationGracePeriodSeconds (kubernetes.io, Pod Lifecycle)
* a volume belongs to fsGroup, whose members may write to it; its new files are the group's, too
    (Security Context)
* one that is evicted has the condition DisruptionTarget, and ends in the same way (kubernetes.io,
    Disruptions)
* one whose liveness probe fails too often ends in the same way, without that condition (Container
    probes)

What happens is printed, as "POD name address", "READY name", "EVICT name", "UNHEALTHY name",
"KILLED name" and "END name code", and the lines of the pods as "name | line".
"""

import contextlib
import itertools
import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.harness.manifests.kubelet import Probe
from tests.kit import real_mnist

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
WORK = pathlib.Path("/mnt")  # of this mount namespace
ROOT = WORK / "root"
CONTAINER = pathlib.Path(__file__).with_name("container.py")
BRIDGE = "10.88.0.1"
TIMEOUT_SECS = 200.0
POLL_SECS = 0.1


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=60)


def make_node(directory: pathlib.Path, user: int) -> None:
    """The file system of all pods, their volumes, and the network between them."""
    run("mount", "-t", "tmpfs", "tmpfs", str(WORK))
    for name in ("upper", "work", "root"):
        (WORK / name).mkdir()
    run(
        "mount",
        "-t",
        "overlay",
        "overlay",
        "-o",
        f"lowerdir=/,upperdir={WORK}/upper,workdir={WORK}/work",
        str(ROOT),
    )
    for path in ("/dev", "/sys"):
        run("mount", "--rbind", path, f"{ROOT}{path}")
    seen = [
        REPOSITORY,
        *(pathlib.Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)),
    ]
    if real_mnist.DIRECTORY:
        seen.append(pathlib.Path(real_mnist.DIRECTORY))
    for path in seen:  # what the image holds
        inside = pathlib.Path(f"{ROOT}{path}")
        inside.mkdir(parents=True, exist_ok=True)
        for parent in inside.relative_to(ROOT).parents:
            os.chmod(ROOT / parent, 0o755)  # of the copy: other users reach it, too
        run("mount", "--bind", str(path), str(inside))
    for name, line in {
        "passwd": "bellwether:x:{0}:{0}::/nonexistent:/bin/false",
        "group": "bellwether:x:{0}:",
    }.items():
        accounts = ROOT / "etc" / name  # the user that the Dockerfile adds
        kept = [
            line for line in accounts.read_text().splitlines() if line.split(":")[2] != str(user)
        ]
        accounts.write_text("\n".join([*kept, line.format(user), ""]))
    (directory / "runs").mkdir()
    (ROOT / "runs").mkdir()
    run("mount", "--bind", str(directory / "runs"), str(ROOT / "runs"))
    os.chown(ROOT / "runs", 0, user)
    os.chmod(ROOT / "runs", 0o2775)
    secret = ROOT / "etc/bellwether"
    secret.mkdir()
    (secret / "token").write_text("5e" * 32)
    os.chown(secret / "token", 0, user)
    os.chmod(secret / "token", 0o440)
    pathlib.Path("/run/netns").mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "tmpfs", "/run/netns")
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "br0", "type", "bridge")
    run("ip", "addr", "add", f"{BRIDGE}/24", "dev", "br0")
    run("ip", "link", "set", "br0", "up")


@dataclass
class Pod:
    """One life of a pod."""

    name: str
    key: tuple[str, ...]
    """By which its controller knows it."""
    address: str
    spec: dict[str, Any]
    names: tuple[str, ...]
    """Under which others find it."""
    process: "subprocess.Popen[str]"
    is_ready: bool = False
    is_disrupted: bool = False
    """Whether it has the condition DisruptionTarget."""
    is_deleted: bool = False
    """Whether it is being ended, by an eviction or by its controller."""
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def main(self) -> psutil.Process:
        """The process of the command, as soon as there is one; raises NoSuchProcess when it has ended."""
        started = 2 if self.spec.get("shareProcessNamespace") else 1
        while len(found := psutil.Process(self.process.pid).children()) < started:
            time.sleep(POLL_SECS)
        return max(found, key=lambda process: process.pid)

    def answers(self) -> bool:
        """What its readiness probe says; a pod without one is ready when it runs."""
        probe = Probe.of(self.spec["containers"][0], "readinessProbe")
        return probe is None or probe.passes(self.address)


@dataclass
class Node:
    """Starts pods and ends them; all but ``evict`` and ``kill`` is called by the controller's thread.

    Args:
        ended: called with a pod that has ended, and its exit code.
        only_ready: names lead to pods that are ready, and not being ended.
        haste: how many times faster than the manifest says liveness probes come, and fail.
    """

    ended: Callable[[Pod, int], None]
    only_ready: bool = False
    haste: float = 1
    pods: dict[tuple[str, ...], Pod] = field(default_factory=dict)
    _lives: "itertools.count[int]" = field(default_factory=lambda: itertools.count(11))
    _changes: "queue.SimpleQueue[Callable[[], None]]" = field(default_factory=queue.SimpleQueue)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(
        self,
        key: tuple[str, ...],
        name: str,
        spec: dict[str, Any],
        names: Iterable[str],
        told: Mapping[str, str],
        labels: Mapping[str, str],
    ) -> None:
        """Starts a pod with another address than any before.

        Args:
            key: by which its controller knows it.
            name: of the pod, and its host name.
            spec: of the manifest.
            names: under which others find it.
            told: environment variables that the controller sets.
            labels: of the pod.
        """
        (container,) = spec["containers"]
        life = next(self._lives)
        address, space = f"10.88.0.{life}", f"pod{life}"
        run("ip", "netns", "add", space)
        run("ip", "link", "add", f"v{life}", "type", "veth", "peer", "name", "eth0", "netns", space)
        run("ip", "link", "set", f"v{life}", "master", "br0", "up")
        network = f"ip addr add {address}/24 dev eth0; ip link set eth0 up; ip link set lo up"
        run("ip", "netns", "exec", space, "sh", "-c", network)
        fields = {f"metadata.labels['{label}']": value for label, value in labels.items()} | {
            "status.podIP": address
        }
        env = {e["name"]: e["value"] if "value" in e else fields[e["valueFrom"]["fieldRef"]["fieldPath"]] for e in container["env"]}  # fmt: skip # noqa: E501
        # As a container runtime sets it: the home of the user in the image, which need not be
        # there.
        image = {
            "PATH": f"{sys.prefix}/bin:/usr/bin:/bin",
            "PYTHONPATH": str(REPOSITORY),
            "HOME": "/nonexistent",
        }
        image |= real_mnist.ENVIRON
        contained = {
            "host": name,
            "root": str(ROOT),
            "user": spec["securityContext"]["runAsUser"],
            "directory": str(REPOSITORY),
            "environ": image | env | dict(told),
            "command": container["command"],
            "shared": spec.get("shareProcessNamespace", False),
        }
        process = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                space,
                sys.executable,
                "-I",
                "-S",
                str(CONTAINER),
                json.dumps(contained),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        pod = self.pods[key] = Pod(name, key, address, spec, tuple(names), process)
        self._publish()
        say(f"POD {name} {address}")
        for work in (self._follow, self._watch):
            self._threads.append(threading.Thread(target=work, args=(pod,)))
            self._threads[-1].start()

    def _publish(self) -> None:
        """Writes the names of the pods that there are."""
        lines = ["127.0.0.1 localhost\n"]
        for pod in self.pods.values():
            found = not self.only_ready or (pod.is_ready and not pod.is_deleted)
            lines.append(f"{pod.address} {' '.join([*(pod.names if found else ()), pod.name])}\n")
        half = ROOT / "etc/hosts.half"
        half.write_text("".join(lines))
        os.chmod(half, 0o644)
        half.replace(ROOT / "etc/hosts")

    def _follow(self, pod: Pod) -> None:
        """Reads the lines of a pod, until it ends."""
        for line in pod.process.stdout or ():
            say(f"{pod.name} | {line.rstrip()}")
        code = pod.process.wait()
        pod.ended.set()
        self._changes.put(lambda: self._end(pod, code))

    def _watch(self, pod: Pod) -> None:
        """Makes the liveness probes of a pod, until it ends or they have failed too often."""
        probe = Probe.of(pod.spec["containers"][0], "livenessProbe")
        if probe is None:
            return
        results: list[bool] = []
        while not pod.ended.wait(probe.period_secs / self.haste):
            results.append(probe.passes(pod.address, timeout_secs=probe.timeout_secs / self.haste))
            if probe.kills(results):
                say(f"UNHEALTHY {pod.name}")
                self.order(lambda: self.delete(pod))
                return

    def _end(self, pod: Pod, code: int) -> None:
        say(f"END {pod.name} {code}")
        del self.pods[pod.key]
        self._publish()
        self.ended(pod, code)

    def look(self) -> None:
        """What has changed since the last look: ends of pods, and who is ready."""
        with contextlib.suppress(queue.Empty):
            self._changes.get(timeout=POLL_SECS)()
        for pod in self.pods.values():
            if not pod.is_ready and pod.answers():
                pod.is_ready = True
                say(f"READY {pod.name}")
                self._publish()

    def order(self, change: Callable[[], None]) -> None:
        """Has the controller's thread do something."""
        self._changes.put(change)

    def delete(self, pod: Pod) -> None:
        """Ends a pod; returns at once, and the end comes later."""
        if not pod.is_deleted:
            pod.is_deleted = True
            self._publish()
            self._threads.append(threading.Thread(target=self._terminate, args=(pod,)))
            self._threads[-1].start()

    def _terminate(self, pod: Pod) -> None:
        grace = pod.spec["terminationGracePeriodSeconds"]
        deadline = time.monotonic() + grace
        hook = pod.spec["containers"][0].get("lifecycle", {}).get("preStop")
        if hook and pod.process.poll() is None:
            run(*hook["exec"]["command"])  # within the grace period
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself meanwhile
            pod.main.send_signal(signal.SIGTERM)
        try:
            pod.process.wait(deadline - time.monotonic())
        except subprocess.TimeoutExpired:
            say(f"KILLED {pod.name}")
            pod.main.kill()

    def finish(self) -> None:
        """Ends all pods, and waits for their ends."""
        for pod in list(self.pods.values()):
            self.delete(pod)
        while self.pods:
            self._changes.get(timeout=TIMEOUT_SECS)()
        for thread in self._threads:
            thread.join()

    def evict(self, *key: str) -> Pod:
        """Has a pod evicted: it is told, and has its grace period; gives the pod."""
        pod = self.pods[key]
        say(f"EVICT {pod.name}")

        def disrupt() -> None:
            pod.is_disrupted = True
            self.delete(pod)

        self.order(disrupt)
        return pod

    def kill(self, *key: str) -> str:
        """Ends a pod as kill -9 of its process does; gives its next address, which is another one."""
        pod = self.pods[key]
        pod.main.kill()
        expect(f"END {pod.name} 137")
        address = expect(f"POD {pod.name} (.*)")[1]
        assert address != pod.address
        return address


_said: list[str] = []
_new = threading.Condition()
_seen = 0


def say(line: str) -> None:
    with _new:
        _said.append(line)
        print(line, flush=True)
        _new.notify_all()


def expect(pattern: str) -> "re.Match[str]":
    """Waits for a line after the one that the last call found."""
    global _seen
    deadline = time.monotonic() + TIMEOUT_SECS
    with _new:
        while True:
            for number in range(_seen, len(_said)):
                if found := re.search(pattern, _said[number]):
                    _seen = number + 1
                    return found
            _seen = len(_said)
            if not _new.wait(deadline - time.monotonic()):
                raise TimeoutError(f"no line with {pattern!r}")


def expect_all(*patterns: str) -> None:
    """Waits for a line of each pattern, in whatever order, after the one that the last call found."""
    left = list(patterns)
    while left:
        line = expect("|".join(f"(?:{pattern})" for pattern in left)).string
        left = [pattern for pattern in left if not re.search(pattern, line)]
