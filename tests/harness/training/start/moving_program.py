"""A ps that comes back behind the same name at another address, as a pod does, in two network namespaces.

unshare -rnm python -m tests.harness.training.start.moving_program DIRECTORY

The chief is in this namespace, the ps in another one. The file of names is ours. Between the lives
of the ps its address goes, which leaves silence (no reset, nobody who refuses), and the name gets
that of the next life: another IPv4 address; an IPv6 address where nobody is and an IPv4 one; the
other way round; an IPv6 address alone. The chief trains all the time. Writes "MOVED n SECONDS" when
it trains with the ps of each life again, and "CODES chief=0 ps=0" at the end.
"""

import contextlib
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import time

import numpy as np

import harness
import runtime as rt
from tests.harness.training.start.namespaces_program import far_side, run

NAME = "ps-0.train"
LIVES = [  # what the name stands for, and at which of these the ps is
    (["10.77.0.11"], "10.77.0.11"),
    (["10.77.0.12"], "10.77.0.12"),
    (["fd00:77::66", "10.77.0.13"], "10.77.0.13"),
    (["10.77.0.66", "fd00:77::14"], "fd00:77::14"),
    (["fd00:77::15"], "fd00:77::15"),
]
JOBS = {"ps": [f"{NAME}:7001"], "worker": ["10.77.0.1:7002"]}
START_SECS = 100.0


def task(job: str, logdir: str) -> None:
    server = rt.Server(JOBS, job, 0)
    if job == "ps":
        server.join()
        return
    with rt.device(rt.replica_device_setter(cluster=JOBS, worker_device="/job:worker/task:0")):
        step = harness.get_or_create_global_step()
        weights = rt.Variable(np.zeros(1000, np.float32), name="weights")
        train = rt.group(step.assign_add(1), weights.assign_add(np.ones(1000, np.float32)))
    supervisor = harness.Supervisor(
        logdir=logdir, global_step=step, save_model_secs=1, save_summaries_secs=0
    )
    stop = pathlib.Path(logdir, "stop")
    with server, supervisor.managed_session(server.target, max_wait_secs=START_SECS) as session:
        while not stop.exists():
            session.run(train)
            os.utime(pathlib.Path(logdir, "trained"))
        count, values = session.run([step, weights])
        assert (values == count).all(), (count, values)


def wait_trained(
    logdir: pathlib.Path, chief: "subprocess.Popen[bytes]", ps: "subprocess.Popen[bytes]"
) -> float:
    """Seconds until a step that began from now on is done."""
    began, touched = time.monotonic(), time.time_ns()
    for _ in range(2):  # one may have been about to end
        while (logdir / "trained").stat().st_mtime_ns <= touched:
            assert chief.poll() is None, f"the chief has ended with {chief.poll()}"
            assert ps.poll() is None, f"the ps has ended with {ps.poll()}"
            assert time.monotonic() - began < START_SECS, "no step"
            time.sleep(0.01)
        touched = time.time_ns()
    return time.monotonic() - began


def main() -> None:
    directory = pathlib.Path(sys.argv[1])
    hosts, logdir, token = directory / "hosts", directory / "run", directory / "token"
    logdir.mkdir()
    (logdir / "trained").touch()
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    hosts.write_text("")
    run("mount", "--bind", str(hosts), "/etc/hosts")
    environ = {**os.environ, "BELLWETHER_SECURITY": str(token)}
    command = (sys.executable, "-m", "tests.harness.training.start.moving_program", str(logdir))
    with far_side() as inside, contextlib.ExitStack() as stack:
        run("ip", "addr", "add", "fd00:77::1/64", "dev", "near", "nodad")

        def begin(life: int) -> "subprocess.Popen[bytes]":
            addresses, here = LIVES[life]
            prefix, *options = ("64", "nodad") if ":" in here else ("24",)
            run(*inside, "ip", "addr", "add", f"{here}/{prefix}", "dev", "far", *options)
            hosts.write_text("".join(f"{address} {NAME}\n" for address in addresses))
            process = subprocess.Popen([*inside, *command, "ps"], env=environ)
            stack.callback(process.kill)
            return process

        ps = begin(0)
        chief = subprocess.Popen([*command, "worker"], env=environ)
        stack.callback(chief.kill)
        wait_trained(logdir, chief, ps)
        for life in range(1, len(LIVES)):
            gone = LIVES[life - 1][1]
            run(*inside, "ip", "addr", "del", f"{gone}/{64 if ':' in gone else 24}", "dev", "far")
            ps.send_signal(signal.SIGKILL)
            ps.wait()
            ps = begin(life)
            print(f"MOVED {life} {wait_trained(logdir, chief, ps):.1f}", flush=True)
        (logdir / "stop").touch()
        print(f"CODES chief={chief.wait(START_SECS)} ps={ps.wait(START_SECS)}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        task(sys.argv[2], sys.argv[1])
    else:
        main()
