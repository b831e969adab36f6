#!/usr/bin/env bash
# A real Slurm of two hosts on one machine: a controller and the nodes n1 and n2 (4 CPUs each; n1 has 4 GPUs that are none),
# each with a network and a name of its own, in private namespaces over a private copy of the file system.
#
#     tests/tools/slurm_two_hosts.sh [--bind DIRECTORY]... COMMAND [ARGUMENTS...]
#
# runs COMMAND on the controller, where srun, sbatch, scancel and scontrol work, and exits with its code; then all is gone.
# The working directory and the environment are kept. Files that are written outside the directories given by --bind are
# gone, too. Needs root, overlayfs, and Debian's packages slurm-wlm, munge and iproute2.
set -euo pipefail

self=$(readlink -f "$0")
if [[ "${1:-}" != --inside ]]; then
    [[ $# -ge 1 ]] || { sed -n '2,10p' "$self" >&2; exit 2; }
    # The first process of the namespace: it reaps what daemons leave, and with it everything ends.
    exec unshare --mount --pid --fork --kill-child --mount-proc -- bash "$self" --inside "$PWD" "$@"
fi
shift
where=$1
shift

work=/mnt  # in this namespace only
mount -t tmpfs tmpfs "$work"
root=$work/root
mkdir "$work/upper" "$work/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
while [[ "${1:-}" == --bind ]]; do
    mkdir -p "$root$2"
    mount --rbind "$2" "$root$2"
    shift 2
done
mkdir -p /run/netns
mount -t tmpfs tmpfs /run/netns

printf '%s\n' '127.0.0.1 localhost' '10.77.0.1 ctl' '10.77.0.11 n1' '10.77.0.12 n2' >"$root/etc/hosts"
mkdir -p "$root"/etc/slurm "$root"/var/spool/{slurmctld,slurmd.n1,slurmd.n2} "$root"/{run,etc,var/log,var/lib}/munge
cat >"$root/etc/slurm/slurm.conf" <<'CONF'
ClusterName=two
SlurmctldHost=ctl
SlurmUser=root
AuthType=auth/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=30
GresTypes=gpu
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd.%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.%n.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.%n.log
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
NodeName=n1 CPUs=4 RealMemory=4000 Gres=gpu:4
NodeName=n2 CPUs=4 RealMemory=4000
PartitionName=all Nodes=n[1-2] Default=YES
PartitionName=gpu Nodes=n1
PartitionName=cpu Nodes=n2
CONF
for i in 0 1 2 3; do mknod "$root/var/lib/gpu$i" c 1 3; done
echo 'NodeName=n1 Name=gpu File=/var/lib/gpu[0-3]' >"$root/etc/slurm/gres.conf"

cat >"$work/hosts.sh" <<'HOSTS'
set -euo pipefail
root=$1 where=$2
shift 2
hostname ctl
ip link set lo up
ip link add br0 type bridge
ip addr add 10.77.0.1/24 dev br0
ip link set br0 up
chroot "$root" bash -c '
    head -c 1024 /dev/urandom >/etc/munge/munge.key
    chown -R munge /etc/munge /run/munge /var/log/munge /var/lib/munge
    chmod 400 /etc/munge/munge.key
    chmod 755 /run/munge
    su munge -s /bin/sh -c munged'
for i in 1 2; do
    ip netns add "n$i"
    ip link add "v$i" type veth peer name eth0 netns "n$i"
    ip link set "v$i" master br0 up
    ip netns exec "n$i" sh -c "ip addr add 10.77.0.1$i/24 dev eth0; ip link set eth0 up; ip link set lo up"
done
chroot "$root" slurmctld
for i in 1 2; do
    nsenter --net="/run/netns/n$i" unshare --uts bash -c "hostname n$i; chroot '$root' slurmd -N n$i"
done
for _ in $(seq 300); do
    [[ $(chroot "$root" sinfo -h -p all -t idle -o %D 2>/dev/null) == 2 ]] && break
    sleep 0.1
done
chroot "$root" sinfo -h -p all -o 'slurm: %D nodes are %T' >&2
exec chroot "$root" bash -c 'cd "$0" && exec "$@"' "$where" "$@"
HOSTS
code=0
unshare --net --uts -- bash "$work/hosts.sh" "$root" "$where" "$@" || code=$?
exit "$code"
