"""Two network namespaces, a cable between them, a cluster across it, and a time in which the cable loses all packets.

unshare -rn python -m tests.harness.training.start.namespaces_program DIRECTORY

Both ps tasks and the chief are on one side, worker 1 on the other. The cable is whole again when
worker 1 has noticed. Writes the tasks' lines as "TASK TEXT" and "HEALED" between them, and ends
with the tasks' exit codes: "CODES worker:0=0 ...".
"""

import contextlib
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import runtime as rt

HERE, THERE = "10.77.0.1", "10.77.0.2"
DROP = "root tbf rate 8bit burst 10 latency 1ms"
"""A queue that takes packets of ten bytes at most, so none; netem's loss is not in every kernel."""
STEP = 200
"""The global step at which the cable is cut."""
START_SECS = 60.0


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=START_SECS)


@contextlib.contextmanager
def far_side() -> Iterator[tuple[str, ...]]:
    """Another namespace, and the command that puts a process into it."""
    holder = subprocess.Popen(["unshare", "-n", "sleep", "600"])
    try:
        own = os.stat("/proc/self/ns/net").st_ino
        deadline = time.monotonic() + START_SECS
        # nobody tells when it has left ours
        while os.stat(f"/proc/{holder.pid}/ns/net").st_ino == own:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        inside = ("nsenter", "-t", str(holder.pid), "-n")
        run("ip", "link", "set", "lo", "up")
        run(
            "ip",
            "link",
            "add",
            "name",
            "near",
            "type",
            "veth",
            "peer",
            "name",
            "far",
            "netns",
            str(holder.pid),
        )
        run("ip", "addr", "add", f"{HERE}/24", "dev", "near")
        run("ip", "link", "set", "near", "up")
        run(*inside, "ip", "addr", "add", f"{THERE}/24", "dev", "far")
        run(*inside, "ip", "link", "set", "far", "up")
        run(*inside, "ip", "link", "set", "lo", "up")
        yield inside
    finally:
        holder.kill()
        holder.wait()


def main() -> None:
    until = pathlib.Path(sys.argv[1]) / "end"
    jobs = {"ps": [f"{HERE}:7001", f"{HERE}:7002"], "worker": [f"{HERE}:7003", f"{THERE}:7004"]}
    lock, noticed, again = threading.Lock(), threading.Event(), threading.Event()
    with far_side() as inside, contextlib.ExitStack() as stack:
        tasks: dict[str, subprocess.Popen[str]] = {}
        readers = []
        for job, hosts in jobs.items():
            for index in range(len(hosts)):
                command = [
                    sys.executable,
                    "-m",
                    "tests.harness.training.start.fault_program",
                    f"--until={until}",
                ]
                command += [f"--{name}_hosts={','.join(listed)}" for name, listed in jobs.items()]
                command += [f"--job_name={job}", f"--task_index={index}"]
                where = inside if hosts[index].startswith(THERE) else ()
                task = subprocess.Popen(
                    [*where, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
                stack.callback(task.wait)
                stack.callback(task.kill)
                tasks[f"{job}:{index}"] = task

                def read(name: str = f"{job}:{index}", task: subprocess.Popen[str] = task) -> None:
                    for line in task.stdout or ():
                        with lock:
                            print(name, line.rstrip(), flush=True)
                        if name == "worker:1" and "No answer from" in line:
                            noticed.set()
                        if name == "worker:1" and "answers again" in line:
                            again.set()

                readers.append(threading.Thread(target=read))
                readers[-1].start()
        _wait_step(jobs["ps"][0])
        run(*inside, "tc", *f"qdisc add dev far {DROP}".split())
        run(*f"tc qdisc add dev near {DROP}".split())
        if not noticed.wait(START_SECS):
            print("worker 1 has not noticed", flush=True)
        with lock:
            print("HEALED", flush=True)
        run(*inside, *"tc qdisc del dev far root".split())
        run(*"tc qdisc del dev near root".split())
        if not again.wait(START_SECS):
            print("worker 1 is not answered again", flush=True)
        until.touch()
        codes = {name: task.wait(START_SECS) for name, task in tasks.items()}
        for reader in readers:
            reader.join()
        print("CODES", *[f"{name}={code}" for name, code in codes.items()], flush=True)


def _wait_step(ps: str) -> None:
    deadline = time.monotonic() + START_SECS
    while time.monotonic() < deadline:
        with contextlib.suppress(rt.OpError):
            if int(rt.probe(ps, 1.0).values.get("global_step") or 0) >= STEP:
                return
        time.sleep(0.02)
    raise TimeoutError(f"step {STEP} was not reached")


if __name__ == "__main__":
    main()
