"""What strangers cost training: the step rate beside 1,000 connections a second of clients without the token.

    python -m benchmarks.strangers [--secs=5] [--rounds=6] [--rate=1000]

A ps and a flood in processes of their own, a worker in this one. Each round measures the step rate four times, one
after the other: with nobody else there; with the same flood at a process that has nothing to do with training, which is
what the flood itself takes of this machine; and with the flood at the ps, by clients that say nothing, and by clients
that say hello and do not have the token. Before that it measures the CPU time of the ps for one connection, which does
not depend on what else the machine does, beside the floor: a process that accepts a connection and closes it, and does
nothing else. Keeps benchmarks/results/strangers.json.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import psutil

import runtime as rt
from benchmarks.common import ROOT
from harness.launch.ports import free_ports

RESULTS = ROOT / "benchmarks" / "results"
OPEN = 200
"""Connections that the flood keeps open; it closes the oldest."""
PS = (
    "import json, sys, runtime as rt; s = rt.Server(json.loads(sys.argv[1]), 'ps', 0); "
    "print(s.data_port, flush=True); s.join()"
)
SINK = """
import socket
listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
print(listener.getsockname()[1], flush=True)
while True:
    listener.accept()[0].close()
"""
FLOOD = """
import collections, socket, sys, time
from runtime.transport import frames
port, rate, keep, secs = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[5])
hello = sys.argv[4] == "hello"
says = frames.pack_header(frames.MAGIC, frames.HELLO, 0, 0, 0, 0, frames.HELLO_BYTES)
says += frames.encode_hello(frames.Hello(1, 1, 1, bytes(frames.NONCE_BYTES)))
says += frames.pack_header(frames.MAGIC, frames.PROOF, 0, 0, 0, 0, frames.PROOF_BYTES) + frames.NO_PROOF
kept, made, began = collections.deque(), 0, time.monotonic()
while (now := time.monotonic()) < began + secs:
    while made < (now - began) * rate:
        sock = socket.create_connection(("127.0.0.1", port))
        made += 1
        if hello:
            try:
                sock.sendall(says)
            except OSError:
                pass  # it has been ended before
        kept.append(sock)
        if len(kept) > keep:
            kept.popleft().close()
    time.sleep(0.001)
print(made, flush=True)
"""


class Training:
    """A worker in this process that trains the classic MNIST model on a ps until it is told to stop."""

    def __init__(self, cluster: dict[str, list[str]]) -> None:
        self.steps = 0
        self.over = threading.Event()
        self.error: BaseException | None = None
        self._cluster = cluster
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def _train(self) -> None:
        with rt.Server(self._cluster, "worker", 0) as worker, rt.Graph().as_default() as graph:
            with rt.device(rt.replica_device_setter(cluster=worker.cluster, worker_device="/job:worker/task:0")):
                w1 = rt.Variable(np.zeros((784, 100), np.float32), name="w1")
                w2 = rt.Variable(np.zeros((100, 10), np.float32), name="w2")
                x = rt.placeholder(np.float32, [100, 784], "x")
                loss = rt.numpy.mean(rt.nn.sigmoid(x @ w1) @ w2)
                grads = rt.gradients(loss, [w1, w2])
                step = rt.group(*(v.assign_add(g) for v, g in zip((w1, w2), grads, strict=True)))
            with rt.Session(worker.target, graph) as session:
                session.run(rt.global_variables_initializer())
                feeds = {x: np.ones((100, 784), np.float32)}
                while not self.over.is_set():
                    session.run(step, feeds)
                    self.steps += 1

    def rate(self, secs: float) -> float:
        """Steps a second from now on, over so many seconds."""
        began, first = time.perf_counter(), self.steps
        time.sleep(secs)
        return (self.steps - first) / (time.perf_counter() - began)

    def stop(self) -> None:
        """Ends training."""
        self.over.set()
        self._thread.join()


def port_of(*command: str) -> tuple["subprocess.Popen[str]", int]:
    """A process and the port that it says first."""
    process = subprocess.Popen([sys.executable, "-c", *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def flooded(training: Training, port: int, says: str, secs: float, rate: float) -> tuple[float, float]:
    """The step rate while strangers connect to a port, and how many connected in a second."""
    arguments = [sys.executable, "-c", FLOOD, str(port), str(rate), str(OPEN), says, str(secs + 2)]
    flood = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    time.sleep(1.5)  # it imports, and begins
    found = training.rate(secs)
    made, _ = flood.communicate()
    return found, int(made) / (secs + 2)


def cpu_us(ps: psutil.Process, port: int, says: str, secs: float, rate: float) -> float:
    """CPU time of an idle ps for one connection of a stranger, in microseconds."""
    arguments = [sys.executable, "-c", FLOOD, str(port), str(rate), str(OPEN), says, str(secs)]
    before = ps.cpu_times()
    made = int(subprocess.run(arguments, check=True, stdout=subprocess.PIPE, text=True).stdout)
    after = ps.cpu_times()
    return (after.user + after.system - before.user - before.system) / made * 1e6


def main() -> None:
    """Measures, prints, and keeps what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--secs", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rate", type=float, default=1000.0, help="connections a second")
    options = parser.parse_args()
    ports = free_ports(2)
    cluster = {job: [f"localhost:{port}"] for job, port in zip(("ps", "worker"), ports, strict=True)}
    ps, data_port = port_of(PS, json.dumps(cluster))
    sink, sink_port = port_of(SINK)
    process = psutil.Process(ps.pid)
    cpu = {says: cpu_us(process, data_port, says, options.secs, options.rate) for says in ("nothing", "hello")}
    floor = cpu_us(psutil.Process(sink.pid), sink_port, "nothing", options.secs, options.rate)
    training = Training(cluster)
    try:
        while training.steps < 500:
            time.sleep(0.1)
        rates: dict[str, list[float]] = {name: [] for name in ("alone", "elsewhere", "silent", "hello")}
        connects: list[float] = []
        ways = {"elsewhere": (sink_port, "nothing"), "silent": (data_port, "nothing"), "hello": (data_port, "hello")}
        for round_ in range(options.rounds):
            for name in itertools.islice(itertools.cycle(rates), round_ % 4, round_ % 4 + 4):  # each is first in turn
                if name == "alone":
                    rates[name].append(training.rate(options.secs))
                else:
                    port, says = ways[name]
                    found, made = flooded(training, port, says, options.secs, options.rate)
                    rates[name].append(found)
                    connects.append(made)
            print({name: round(values[-1], 1) for name, values in rates.items()}, flush=True)
    finally:
        training.stop()
        for started in (ps, sink):
            started.kill()
            started.wait()

    def beside(name: str, other: str) -> float:
        pairs = zip(rates[name], rates[other], strict=True)
        return round(100 * (statistics.median(one / two for one, two in pairs) - 1), 1)

    found_all = {
        "host": {"cpus": os.cpu_count(), "python": platform.python_version(), "load_average": os.getloadavg()[0]},
        "connections_a_second": round(statistics.mean(connects)),
        "cpu_us_of_the_ps_for_a_connection": {"silent": round(cpu["nothing"]), "hello": round(cpu["hello"])},
        "cpu_us_of_accept_and_close": round(floor),
        "steps_a_second": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "percent_beside_alone": {name: beside(name, "alone") for name in ways},
        "percent_beside_the_flood_elsewhere": {name: beside(name, "elsewhere") for name in ("silent", "hello")},
    }
    print(json.dumps(found_all))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "strangers.json").write_text(json.dumps(found_all, indent=2) + "\n")


if __name__ == "__main__":
    main()
