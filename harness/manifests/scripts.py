"""Launch files that are shell at heart: a batch script for Slurm, a task for SkyPilot."""

from __future__ import annotations

import math
import shlex
from typing import Any

from harness.launch.policy import PS, WORKER
from harness.manifests.request import PORT, SAVE_SECS, ClusterRequest, quoted


def slurm(request: ClusterRequest) -> str:
    """A batch script: one step of all tasks, each under the launcher's supervisor of one task."""
    count = request.ps + request.workers
    memory = max(request.memory_mib(PS), request.memory_mib(WORKER))
    cores = math.ceil(max(request.cores(PS), request.cores(WORKER)))
    command = shlex.join([*request.command, f"--preempt_grace_secs={SAVE_SECS - 10}"])
    directives = [
        f"--job-name={request.name}",
        f"--ntasks={count}",
        f"--cpus-per-task={cores}",
        f"--mem-per-cpu={math.ceil(memory / cores)}M",
        *([f"--gpus-per-task={request.gpus}"] if request.gpus else []),
        "--time=24:00:00",
        f"--signal=TERM@{SAVE_SECS}",
        "--requeue",
        "--open-mode=append",
        "--output=slurm-%j.out",
    ]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            request.heading("slurm", "Submit it with sbatch, on a file system that all hosts see.").rstrip(),
            *(f"#SBATCH {directive}" for directive in directives),
            "set -eu",
            "",
            "# The same directory after every requeue: training goes on from the checkpoint in it.",
            f"run=${{RUN:-$PWD/runs/{request.name}-$SLURM_JOB_ID}}",
            'mkdir -p "$run"',
            'rm -rf "$run/certs" "$run/failed"',
            "# A CA of this start of the job, and a certificate for each of its hosts: connections between hosts are",
            "# TLS, and tasks of an earlier start are not let in.",
            'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)',
            'python -m harness.certs --out="$run/certs" --hosts="$hosts" --days=30 >/dev/null',
            'export BELLWETHER_SECURITY="$run/certs"',
            "",
            "code=0",
            f"srun python -m harness.launch --per_task --ps={request.ps} --workers={request.workers} "
            '--termination_log="$run/failed" -- \\',
            f'    {command} --logdir="$run" "$@" || code=$?',
            "",
            "# A task that the others cannot do without has failed for good: it says why.",
            'if [[ -s "$run/failed" ]]; then',
            '    read -r failed why <"$run/failed"',
            '    echo "$why" >&2',
            '    exit "$failed"',
            "fi",
            "# 143: asked to make room, and the chief has saved. On with it in the next time slot.",
            "if [[ $code == 143 ]]; then",
            '    exec scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
            "",
        ]
    )


def skypilot(request: ClusterRequest) -> dict[str, Any]:
    """A task for a cluster of equal nodes: a ps or a worker on each, the ps on the first."""
    memory = max(request.memory_mib(PS), request.memory_mib(WORKER))
    cores = math.ceil(max(request.cores(PS), request.cores(WORKER)))
    resources: dict[str, Any] = {"cpus": f"{cores}+", "memory": f"{math.ceil(memory / 1024)}+", "ports": [PORT]}
    if request.gpus:
        resources["accelerators"] = {"GPU": request.gpus}
    resources["job_recovery"] = {"max_restarts_on_errors": 10, "recover_on_exit_codes": [33, 34]}
    run = [
        "set -eu",
        f'hosts=$(sed "s/$/:{PORT}/" <<<"$SKYPILOT_NODE_IPS")',
        f'ps_hosts=$(head -n {request.ps} <<<"$hosts" | paste -sd,)',
        f'worker_hosts=$(tail -n +{request.ps + 1} <<<"$hosts" | paste -sd,)',
        f"if ((SKYPILOT_NODE_RANK < {request.ps})); then",
        "    job=ps index=$SKYPILOT_NODE_RANK",
        *(f"    {line}" for line in quoted({k: v for k, v in request.environment(PS).items() if k not in _PATHS})),
        "else",
        f"    job=worker index=$((SKYPILOT_NODE_RANK - {request.ps}))",
        "fi",
        'printf %s "$BELLWETHER_TOKEN" >~/.bellwether-token && chmod 600 ~/.bellwether-token',
        "export BELLWETHER_SECURITY=~/.bellwether-token PYTHONUNBUFFERED=1",
        shlex.join(request.arguments("skypilot"))
        + ' --ps_hosts="$ps_hosts" --worker_hosts="$worker_hosts" --job_name="$job" --task_index="$index"',
    ]
    return {
        "name": request.name,
        "num_nodes": request.ps + request.workers,
        "resources": resources,
        "secrets": {"BELLWETHER_TOKEN": None},
        "file_mounts": {"/runs": {"name": f"{request.name}-runs", "mode": "MOUNT"}},
        "workdir": ".",
        "setup": "pip install -r requirements.lock && pip install --no-deps -e .\n",
        "run": "\n".join(run) + "\n",
    }


_PATHS = ("BELLWETHER_SECURITY", "PYTHONUNBUFFERED")
