#!/usr/bin/env bash
{{heading}}
# Submit it with sbatch, on a file system that all hosts see.
#SBATCH --job-name={{name}}
#SBATCH --ntasks={{first_tasks}}
#SBATCH --cpus-per-task={{first_cores}}
#SBATCH --mem-per-cpu={{first_core_mib}}M
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@{{save_secs}}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
# The workers are a group of their own, as the ps need no GPU. Give each group its partition.  #?gpus
#SBATCH hetjob  #?gpus
#SBATCH --ntasks={{second_tasks}}  #?gpus
#SBATCH --cpus-per-task={{second_cores}}  #?gpus
#SBATCH --mem-per-cpu={{second_core_mib}}M  #?gpus
#SBATCH --gpus-per-task={{gpus}}  #?gpus
#SBATCH --time=24:00:00  #?gpus
#SBATCH --signal=TERM@{{save_secs}}  #?gpus
set -eu

# The same directory after every requeue: training goes on from the checkpoint in it.
run=${RUN:-$PWD/runs/{{name}}-$SLURM_JOB_ID}
mkdir -p "$run"
rm -rf "$run/certs" "$run/failed"
# A CA of this start of the job, and a certificate for each of its hosts: connections between hosts are
# TLS, and tasks of an earlier start are not let in.
lists=$SLURM_JOB_NODELIST  #?!gpus
lists=$SLURM_JOB_NODELIST_HET_GROUP_0,$SLURM_JOB_NODELIST_HET_GROUP_1  #?gpus
hosts=$(scontrol show hostnames "$lists" | sort -u | paste -sd,)
python -m harness.certs --out="$run/certs" --hosts="$hosts" --days=30 >/dev/null
export BELLWETHER_SECURITY="$run/certs"

export BELLWETHER_REQUIRE_GPU=1  #?gpus
code=0
srun{{groups}} python -m harness.launch --per_task --ps={{ps}} --workers={{workers}} --termination_log="$run/failed" -- \
    {{command}} --logdir="$run" "$@" || code=$?

# A task that the others cannot do without has failed for good, and has left the reason.
if [[ -s "$run/failed" ]]; then
    read -r failed why <"$run/failed"
    echo "$why" >&2
    exit "$failed"
fi
# 143: asked to make room, and the chief has saved. Training goes on in the next time slot.
if [[ $code == 143 ]]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
