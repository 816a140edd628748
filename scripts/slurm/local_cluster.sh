#!/usr/bin/env bash
# A SLURM cluster of two nodes on this machine, to try job scripts without a queue. All its files are in one folder.
#
#   scripts/slurm/local_cluster.sh start /tmp/slurm        # then: export SLURM_CONF=/tmp/slurm/slurm.conf
#   RENDEZVOUS=localhost sbatch --nodes=2 --gpus-per-node=1 --cpus-per-task=1 scripts/train_slurm.sbatch --cpu
#   scripts/slurm/local_cluster.sh stop /tmp/slurm         # ends its jobs and daemons
#
# Needs root, slurmctld, slurmd and munged (Debian: apt-get install slurm-wlm munge). Each node claims 8 processors, the
# memory of this machine and 8 GPUs, which need not exist. Ports: PORT to PORT + 2.
set -euo pipefail
fail() {
  echo "local_cluster.sh: error: ${1//[[:cntrl:]]/?}" >&2
  exit 2
}
(($# == 2)) && [[ $1 == start || $1 == stop ]] || fail "usage: local_cluster.sh start|stop FOLDER"
mkdir -p "$2"
# Daemons of root follow the links in this folder, and root ends the processes that it names.
[[ -O $2 && ! -L $2 ]] || fail "$2 belongs to another user or is a link; choose a folder of yours"
chmod go-w "$2"
[[ -z $(find "$2" -type l -print -quit) ]] || fail "$2 has links; choose an empty folder"
folder=$(cd "$2" && pwd)
port=${PORT:-26817}
export SLURM_CONF=$folder/slurm.conf

stop() {
  local name pid
  scancel --user=root 2>/dev/null || true
  for name in node1 node2 slurmctld munged; do
    pid=$(cat "$folder/$name.pid" 2>/dev/null) || continue
    kill "$pid" 2>/dev/null || true
    for _ in {1..100}; do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.1
    done
    rm -f "$folder/$name.pid"
  done
}
if [[ $1 == stop ]]; then
  [[ -f $SLURM_CONF ]] || fail "there is no cluster in $folder"
  stop
  exit
fi

((EUID == 0)) || fail "slurmd needs root"
((${#folder} <= 60)) || fail "$folder is too long for its sockets; give a path of at most 60 letters"
for program in munged slurmctld slurmd; do
  command -v "$program" >/dev/null || fail "there is no $program; Debian: apt-get install slurm-wlm munge"
done
[[ ! -f $folder/slurmctld.pid ]] || fail "a cluster runs in $folder; stop it first"
mib=$(awk '/^MemTotal/ {print int($2 / 1024)}' /proc/meminfo)
cat >"$folder/slurm.conf" <<END
ClusterName=local
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=root
SlurmctldPort=$port
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge=600
GresTypes=gpu
NodeName=node1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=8 RealMemory=$mib Gres=gpu:8
NodeName=node2 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=8 RealMemory=$mib Gres=gpu:8
PartitionName=local Nodes=ALL Default=YES MaxTime=INFINITE
END
touch "$folder"/gpu{0..7}
echo "Name=gpu File=$folder/gpu[0-7]" >"$folder/gres.conf"
mkdir -p "$folder"/{state,spool-node1,spool-node2}
head -c 128 /dev/urandom >"$folder/munge.key"
chmod 600 "$folder/munge.key"
rm -f "$folder"/*.log
trap stop ERR
munged --force --socket="$folder/munge.socket" --key-file="$folder/munge.key" --pid-file="$folder/munged.pid" \
  --log-file="$folder/munged.log" --seed-file="$folder/munged.seed" 2>"$folder/munged.start"
slurmctld -c
slurmd -N node1
slurmd -N node2
for _ in {1..300}; do
  [[ $(sinfo --noheader --format=%T 2>/dev/null) != idle ]] || { trap - ERR; echo "export SLURM_CONF=$SLURM_CONF"; exit; }
  sleep 0.2
done
stop
fail "the nodes did not start; see $folder/*.log"
