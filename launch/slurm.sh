#!/usr/bin/env bash
#SBATCH --job-name=sprl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300
#
# Runs sprl on the nodes of a Slurm job. The checkout and its environment (make install EXTRAS=cuda; VENV=... names another one)
# must be on a file system that all nodes share.
#
#   sbatch --nodes=4 launch/slurm.sh --config=configs/qwen_gsm8k.py:qwen2.5-7b --workdir=/shared/runs/qwen
#
# One task per node uses the node's 8 GPUs. For one task per GPU:
#   sbatch --ntasks-per-node=8 --gpus-per-task=1 --cpus-per-task=8 ...
#
# Preemption and time limit: Slurm sends SIGTERM to the tasks at a preemption, and 300 to 360 s before the time limit (--signal).
# Every process saves a checkpoint and exits, and the last lines of this script queue the job again. It then resumes, because the
# same command in the same work directory resumes. If a task dies, the others log its name and node and exit. The job resumes when
# it is submitted again.
#
# Nodes without internet need folders with the model and the problems (--config.model.path=FOLDER --config.task.path=FOLDER), or an
# HF_HOME that has both.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"

# --- settings of XLA and NCCL -----------------------------------------------------------------------------------------

# XLA schedules collectives beside independent computation.
export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_latency_hiding_scheduler=true"
# A restarted job reads its compiled programs from this folder, which all nodes share.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.jax_cache}"
# NCCL logs the reason of a failure. NCCL_DEBUG=INFO also logs the network in use: NET/IB is InfiniBand or RoCE; NET/Socket is
# TCP over Ethernet, which is tens of times slower.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# Set these only if NCCL chooses the wrong network. The names depend on the cluster (ip link, ibv_devices):
#   NCCL_SOCKET_IFNAME=eth0    the interface on which processes connect to each other
#   NCCL_IB_HCA=mlx5           the adapters for data

# --- the processes: sprl/distributed/process_group.py reads these variables -------------------------------------------

# Process 0 is on the first node. Two jobs that share a node must not share a port.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export SPRL_COORDINATOR=${nodes%%$'\n'*}:$((20000 + SLURM_JOB_ID % 20000)) SPRL_PROCESSES=$SLURM_NTASKS

export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" # srun does not read SLURM_CPUS_PER_TASK

status=0
# shellcheck disable=SC2016 # SLURM_PROCID is expanded in the task
srun --kill-on-bad-exit=1 --label bash -c 'SPRL_PROCESS=$SLURM_PROCID exec "$@"' task \
  "${VENV:-.venv}/bin/python" -m sprl.main "$@" || status=$?

# A run that SIGTERM ended and a finished run both exit with status 0. Two facts tell them apart. A preempted job has a PreemptTime:
# within the grace time of a partition Slurm does not queue a job again that has ended. Before the time limit the signal comes up
# to 360 s early, so 390 s covers it. If a finished run is queued again, it exits at once.
# `grep -q` would end at the first match, and scontrol by SIGPIPE, which is a failure under pipefail.
preempted() { scontrol show job "$SLURM_JOB_ID" | grep 'PreemptTime=[0-9]' >/dev/null; }
late() { [ -n "${SLURM_JOB_END_TIME:-}" ] && [ $((SLURM_JOB_END_TIME - $(date +%s))) -lt 390 ]; }
# 143: SIGTERM came while no step ran, as during an export.
if { [ "$status" -eq 0 ] || [ "$status" -eq 143 ]; } && { late || preempted; }; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
