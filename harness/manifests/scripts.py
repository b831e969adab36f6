"""Launch files that are shell at heart: a batch script for Slurm."""

from __future__ import annotations

import math
import shlex

from harness.launch.policy import PS, WORKER
from harness.manifests.request import SAVE_SECS, ClusterRequest


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
