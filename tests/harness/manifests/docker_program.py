"""The steps of configs/docker/Dockerfile, one after the other, in a private copy of this machine's file system.

unshare --mount --net --pid --fork --kill-child --mount-proc python -m
tests.harness.manifests.docker_program

This machine stands for the base image, with what is installed here: `pip install -r
requirements.lock` finds all of it there, in the versions of the lock, and asks no network, for
there is none. Then CMD runs as a ps, as number 1 of its process numbers and as USER, and gets
SIGTERM until it ends. Prints "RUN command" before each step, and "CODE n" last.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import psutil

from tests.harness.manifests.test_docker import steps

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
CONTAINER = pathlib.Path(__file__).with_name("container.py")
WORK = pathlib.Path("/mnt")  # of this mount namespace
ROOT = WORK / "root"
PS = ("--ps_hosts=127.0.0.1:2222", "--worker_hosts=127.0.0.1:2223", "--job_name=ps")


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=300)


def overlay(lower: pathlib.Path, name: str, at: pathlib.Path) -> None:
    """A writable copy of a directory."""
    for part in ("upper", "work"):
        (WORK / f"{name}.{part}").mkdir()
    at.mkdir(parents=True, exist_ok=True)
    parts = f"lowerdir={lower},upperdir={WORK}/{name}.upper,workdir={WORK}/{name}.work"
    run("mount", "-t", "overlay", "overlay", "-o", parts, str(at))


def make_base() -> None:
    """What stands for the base image: this machine without a user 1000, with the packages of this environment."""
    run("mount", "-t", "tmpfs", "tmpfs", str(WORK))
    overlay(pathlib.Path("/"), "base", ROOT)
    for path in ("/dev", "/sys", "/proc"):
        run("mount", "--rbind", path, f"{ROOT}{path}")
    prefix, base = pathlib.Path(sys.prefix).resolve(), pathlib.Path(sys.base_prefix).resolve()
    overlay(prefix, "packages", pathlib.Path(f"{ROOT}{prefix}"))
    if base != prefix:
        pathlib.Path(f"{ROOT}{base}").mkdir(parents=True, exist_ok=True)
        run("mount", "--bind", str(base), f"{ROOT}{base}")
    for path in (prefix, base):
        for parent in path.relative_to("/").parents:
            os.chmod(ROOT / parent, 0o755)  # of the copy: USER reaches it, too
    for name in ("passwd", "group", "shadow"):
        accounts = ROOT / "etc" / name
        kept = [
            line
            for line in accounts.read_text().splitlines(True)
            if "1000" not in line.split(":")[1:4]
        ]
        accounts.write_text("".join(kept))
    run("ip", "link", "set", "lo", "up")


def ask_to_end(container: subprocess.Popen[str]) -> int:
    """Sends SIGTERM until it has ended: the kernel keeps it from process number 1 as long as that has no handler."""
    for _ in range(60):
        container.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return container.wait(1)
    raise TimeoutError("a minute of SIGTERM has not ended it")


def main() -> None:
    make_base()
    environ = {
        "PATH": f"{pathlib.Path(sys.prefix).resolve()}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/tmp",
    }
    directory, user, command = "/", 0, [""]
    for word, rest in steps():
        match word:
            case "ENV":
                environ |= dict(re.findall(r"(\w+)=(\S+)", rest))
            case "ARG":
                name, _, default = rest.partition("=")
                environ[name] = default.strip('"')
            case "WORKDIR":
                directory = rest
                (ROOT / rest.lstrip("/")).mkdir(parents=True)
            case "COPY":
                *sources, target = rest.split()
                there = ROOT / directory.lstrip("/") / target
                if len(sources) == 1 and (REPOSITORY / sources[0]).is_dir():
                    run("cp", "-r", str(REPOSITORY / sources[0]), str(there))
                else:
                    run("cp", *(str(REPOSITORY / source) for source in sources), str(there))
            case "RUN":
                print(f"RUN {rest}", flush=True)
                inside = [
                    "chroot",
                    str(ROOT),
                    "env",
                    "--ignore-environment",
                    f"--chdir={directory}",
                ]
                run(
                    *inside,
                    *(f"{name}={value}" for name, value in environ.items()),
                    "sh",
                    "-c",
                    rest,
                )
            case "USER":
                user = int(rest.partition(":")[0])
            case "CMD":
                command = json.loads(rest)
            case _:
                assert word in ("FROM", "VOLUME", "EXPOSE"), word
    told = {
        "host": "ps-0",
        "root": str(ROOT),
        "user": user,
        "directory": directory,
        "environ": environ,
    }
    container = subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            str(CONTAINER),
            json.dumps({**told, "command": [*command, *PS]}),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert container.stdout is not None
    for line in container.stdout:
        print(line, end="", flush=True)
        if "serves at" in line:
            break
    (first,) = psutil.Process(container.pid).children()
    assert set(first.uids()) == {user} and user, first.uids()
    code = ask_to_end(container)
    print(container.stdout.read(), end="")
    print(f"CODE {code}", flush=True)


if __name__ == "__main__":
    main()
