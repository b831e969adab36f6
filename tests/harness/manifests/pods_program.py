"""Pods of a JobSet without Kubernetes: what a manifest says is started, by the rules that JobSet documents.

unshare --mount --net --pid --fork --kill-child --mount-proc python -m tests.harness.manifests.pods_program SCENARIO DIR

DIR has the manifest, job.yaml. A pod is a process with a network, a name and process numbers of its own, over a private
copy of the file system, as the user of the manifest, with the manifest's command, its environment and nothing else. The
names of pods are in a file of names. The rules, with their source:

* a pod's name is ``<jobset>-<job>-<job index>-<pod index>``, and ``.<subdomain>`` after it resolves to its address as
  soon as it has one (jobset.sigs.k8s.io/docs/concepts: DNS hostnames, publishNotReadyAddresses)
* startupPolicy InOrder: a replicated job begins when all pods of the one before are ready, by their readiness probe
* a failed pod fails its child job (backoffLimit 0); with an exit code that its podFailurePolicy names, for the reason
  PodFailurePolicy, else BackoffLimitExceeded. The first rule of the failurePolicy for that job and reason decides:
  FailJobSet, or RestartJob(AndIgnoreMaxRestarts): the child job and its pod are made anew, with another address; the
  others are left alone (keps/262 and its API documentation)
* successPolicy All: when the named jobs are complete the JobSet is, and what still runs is deleted: preStop, SIGTERM,
  and SIGKILL after terminationGracePeriodSeconds (kubernetes.io, Pod Lifecycle)

Prints what happens as "POD name address", "READY name", "END name code", "JOBSET Completed" or "JOBSET Failed", and the
lines of the pods as "name | line".
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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import psutil
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

import harness

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
WORK = pathlib.Path("/mnt")  # of this mount namespace
ROOT = WORK / "root"
CONTAINER = pathlib.Path(__file__).with_name("container.py")
BRIDGE = "10.88.0.1"
TIMEOUT_SECS = 200.0
POLL_SECS = 0.1
NAME_LABEL, JOB_LABEL, INDEX_LABEL = (
    f"jobset.sigs.k8s.io/{label}" for label in ("jobset-name", "replicatedjob-name", "job-index")
)


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=60)


def make_node(directory: pathlib.Path, user: int) -> None:
    """The file system of all pods, their volumes, and the network between them."""
    run("mount", "-t", "tmpfs", "tmpfs", str(WORK))
    for name in ("upper", "work", "root"):
        (WORK / name).mkdir()
    run("mount", "-t", "overlay", "overlay", "-o", f"lowerdir=/,upperdir={WORK}/upper,workdir={WORK}/work", str(ROOT))
    for path in ("/dev", "/sys"):
        run("mount", "--rbind", path, f"{ROOT}{path}")
    seen = [REPOSITORY, *(pathlib.Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix))]
    if "MNIST_DIR" in os.environ:
        seen.append(pathlib.Path(os.environ["MNIST_DIR"]).resolve())
    for path in seen:  # what the image holds
        inside = pathlib.Path(f"{ROOT}{path}")
        inside.mkdir(parents=True, exist_ok=True)
        for parent in inside.relative_to(ROOT).parents:
            os.chmod(ROOT / parent, 0o755)  # of the copy: other users reach it, too
        run("mount", "--bind", str(path), str(inside))
    (directory / "runs").mkdir()
    (ROOT / "runs").mkdir()
    run("mount", "--bind", str(directory / "runs"), str(ROOT / "runs"))
    os.chown(ROOT / "runs", user, user)  # fsGroup
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

    job: str
    index: int
    name: str
    address: str
    spec: dict[str, Any]
    process: "subprocess.Popen[str]"
    ready: bool = False

    @property
    def main(self) -> psutil.Process:
        """The process that is number 1 in the pod."""
        (found,) = psutil.Process(self.process.pid).children()
        return found

    def is_ready(self) -> bool:
        """What its readiness probe says; a pod without one is ready when it runs."""
        probe = self.spec["containers"][0].get("readinessProbe")
        if probe is None:
            return True
        with grpc.insecure_channel(f"{self.address}:{probe['grpc']['port']}") as channel:
            try:
                asked = health_pb2.HealthCheckRequest()
                told = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=probe["timeoutSeconds"])
            except grpc.RpcError:
                return False
            return bool(told.status == health_pb2.HealthCheckResponse.SERVING)


@dataclass
class JobSet:
    """The controller: makes pods, and makes them anew, as its manifest says."""

    manifest: dict[str, Any]
    directory: pathlib.Path
    pods: dict[tuple[str, int], Pod] = field(default_factory=dict)
    complete: set[tuple[str, int]] = field(default_factory=set)
    restarts: int = 0
    result: str = ""
    lives: "itertools.count[int]" = field(default_factory=lambda: itertools.count(11))
    changes: "queue.SimpleQueue[Callable[[], None]]" = field(default_factory=queue.SimpleQueue)
    threads: list[threading.Thread] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    def jobs(self) -> dict[str, dict[str, Any]]:
        return {job["name"]: job for job in self.manifest["spec"]["replicatedJobs"]}

    def control(self) -> None:
        """Runs it to its end."""
        assert self.manifest["spec"]["startupPolicy"]["startupPolicyOrder"] == "InOrder"
        for name, job in self.jobs().items():
            for index in range(job["replicas"]):
                self.start(name, index)
            while not self.result and not all(self.settled(name, index) for index in range(job["replicas"])):
                self.look()
        while not self.result:
            self.look()
        for pod in list(self.pods.values()):
            self.delete(pod)
        for thread in self.threads:
            thread.join()
        say(f"JOBSET {self.result}")

    def settled(self, job: str, index: int) -> bool:
        return (job, index) in self.complete or self.pods[job, index].ready

    def look(self) -> None:
        """What has changed since the last look: ends of pods, and who is ready."""
        try:
            self.changes.get(timeout=POLL_SECS)()
        except queue.Empty:
            pass
        for pod in self.pods.values():
            if not pod.ready and pod.is_ready():
                pod.ready = True
                say(f"READY {pod.name}")

    def start(self, job: str, index: int) -> None:
        spec = self.jobs()[job]["template"]["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        life = next(self.lives)
        name, address, space = f"{self.name}-{job}-{index}-0", f"10.88.0.{life}", f"pod{life}"
        run("ip", "netns", "add", space)
        run("ip", "link", "add", f"v{life}", "type", "veth", "peer", "name", "eth0", "netns", space)
        run("ip", "link", "set", f"v{life}", "master", "br0", "up")
        network = f"ip addr add {address}/24 dev eth0; ip link set eth0 up; ip link set lo up"
        run("ip", "netns", "exec", space, "sh", "-c", network)
        labels = {NAME_LABEL: self.name, JOB_LABEL: job, INDEX_LABEL: str(index)}
        fields = {f"metadata.labels['{label}']": value for label, value in labels.items()} | {"status.podIP": address}
        told = {e["name"]: e["value"] if "value" in e else fields[e["valueFrom"]["fieldRef"]["fieldPath"]] for e in container["env"]}  # fmt: skip # noqa: E501
        told["JOB_COMPLETION_INDEX"] = "0"  # completionMode is Indexed by JobSet's default
        image = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "HOME": "/tmp"}
        image |= {"MNIST_DIR": os.environ["MNIST_DIR"]} if "MNIST_DIR" in os.environ else {}
        contained = {
            "host": name,
            "root": str(ROOT),
            "user": spec["securityContext"]["runAsUser"],
            "directory": str(REPOSITORY),
            "environ": image | told,
            "command": container["command"],
        }
        process = subprocess.Popen(
            ["ip", "netns", "exec", space, sys.executable, "-I", "-S", str(CONTAINER), json.dumps(contained)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        pod = self.pods[job, index] = Pod(job, index, name, address, spec, process)
        self.publish()
        say(f"POD {name} {address}")
        self.threads.append(threading.Thread(target=self.follow, args=(pod,)))
        self.threads[-1].start()

    def publish(self) -> None:
        """Writes the names of the pods that there are."""
        subdomain = self.manifest["spec"]["network"]["subdomain"]
        lines = ["127.0.0.1 localhost\n", *(f"{p.address} {p.name}.{subdomain} {p.name}\n" for p in self.pods.values())]
        half = ROOT / "etc/hosts.half"
        half.write_text("".join(lines))
        os.chmod(half, 0o644)
        half.replace(ROOT / "etc/hosts")

    def follow(self, pod: Pod) -> None:
        """Reads the lines of a pod, until it ends."""
        for line in pod.process.stdout or ():
            say(f"{pod.name} | {line.rstrip()}")
        code = pod.process.wait()
        self.changes.put(lambda: self.ended(pod, code))

    def ended(self, pod: Pod, code: int) -> None:
        say(f"END {pod.name} {code}")
        key = pod.job, pod.index
        del self.pods[key]
        self.publish()
        if self.result:
            return
        if code == 0:
            self.complete.add(key)
            success = self.manifest["spec"]["successPolicy"]
            assert success["operator"] == "All"
            awaited = {(job, i) for job in success["targetReplicatedJobs"] for i in range(self.jobs()[job]["replicas"])}
            self.result = "Completed" if awaited <= self.complete else ""
            return
        policy = self.jobs()[pod.job]["template"]["spec"]["podFailurePolicy"]["rules"]
        fatal = any(
            code in rule.get("onExitCodes", {}).get("values", ()) for rule in policy if rule["action"] == "FailJob"
        )
        reason = "PodFailurePolicy" if fatal else "BackoffLimitExceeded"
        failure = self.manifest["spec"]["failurePolicy"]
        rule = next(
            rule
            for rule in failure["rules"]
            if pod.job in rule.get("targetReplicatedJobs", [pod.job])
            and reason in rule.get("onJobFailureReasons", [reason])
        )
        say(f"RULE {pod.name} {rule['name']} {rule['action']}")
        self.restarts += rule["action"] == "RestartJob"
        if rule["action"] == "FailJobSet" or self.restarts > failure["maxRestarts"]:
            self.result = "Failed"
        else:
            assert rule["action"] in ("RestartJob", "RestartJobAndIgnoreMaxRestarts")
            self.start(pod.job, pod.index)

    def delete(self, pod: Pod) -> None:
        """As a kubelet ends a pod."""
        if pod.process.poll() is None:
            hook = pod.spec["containers"][0].get("lifecycle", {}).get("preStop")
            if hook:
                run(*hook["exec"]["command"])
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself meanwhile
                pod.main.send_signal(signal.SIGTERM)
            try:
                pod.process.wait(pod.spec["terminationGracePeriodSeconds"])
            except subprocess.TimeoutExpired:
                say(f"KILLED {pod.name}")
                pod.process.kill()
        self.threads[-1].join(0)
        while (pod.job, pod.index) in self.pods:
            self.changes.get(timeout=TIMEOUT_SECS)()


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


def kill(jobset: JobSet, job: str, index: int) -> str:
    """Ends a pod as kill -9 of its process does; gives its next address, which is another one."""
    pod = jobset.pods[job, index]
    pod.main.kill()
    expect(f"END {pod.name} 137")
    address = expect(f"POD {pod.name} (.*)")[1]
    assert address != pod.address
    return address


def deaths(jobset: JobSet) -> None:
    """A ps and then both workers die and come back elsewhere; MNIST is trained to its end."""
    runs = jobset.directory / "runs"
    (runs / "further.flags").write_text("--train_steps=1000000000\n")
    expect("READY mnist-ps-0-0")
    expect("POD mnist-worker-0-0")  # not before
    expect(r"mnist-worker-1-0 \| .*step \d")
    expect(r"mnist-worker-0-0 \| .*saved .*/[1-9]\d*$")
    workers = [jobset.pods["worker", index].process.pid for index in (0, 1)]
    kill(jobset, "ps", 0)
    expect(r"mnist-worker-0-0 \| .*training goes on from step [1-9]")
    expect(r"mnist-worker-1-0 \| .*step \d")
    assert [jobset.pods["worker", index].process.pid for index in (0, 1)] == workers, "nobody restarts the others"
    kill(jobset, "worker", 1)
    expect(r"mnist-worker-1-0 \| .*step \d")
    saved = int(pathlib.Path(harness.latest_checkpoint(runs / "mnist" / "model.ckpt") or "").name)
    (runs / "further.flags").write_text(f"--train_steps={saved + 3000}\n")  # from their next start on
    kill(jobset, "worker", 0)
    kill(jobset, "worker", 1)
    expect(r"Test-Accuracy: 0\.[89]")
    expect("JOBSET Completed")


def wrong_data(jobset: JobSet) -> None:
    """What would come again fails the job at once."""
    (jobset.directory / "runs" / "further.flags").write_text("--data_dir=/nowhere\n")
    expect("END mnist-worker-[01]-0 42")
    expect("RULE .* never-again FailJobSet")
    expect("JOBSET Failed")


def main(scenario: str, where: str) -> None:
    directory = pathlib.Path(where)
    manifest = next(o for o in yaml.safe_load_all((directory / "job.yaml").read_text()) if o["kind"] == "JobSet")
    pods = [job["template"]["spec"]["template"]["spec"] for job in manifest["spec"]["replicatedJobs"]]
    make_node(directory, pods[0]["securityContext"]["fsGroup"])
    jobset = JobSet(manifest, directory)
    story = {"deaths": deaths, "wrong-data": wrong_data}[scenario]
    controller = threading.Thread(target=jobset.control, daemon=True)
    (directory / "runs" / "further.flags").touch()
    controller.start()
    story(jobset)
    controller.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
