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
# A run over the nodes of a Slurm job, from a checkout with an environment (make setup, or VENV=...) that all nodes see:
#
#   sbatch --nodes=4 launch/slurm.sh --config=configs/qwen_gsm8k.py:qwen2.5-7b --workdir=/shared/runs/qwen
#
# One task a node drives its 8 GPUs. One task a GPU: sbatch --ntasks-per-node=8 --gpus-per-task=1 --cpus-per-task=8 ...
#
# Preemption and the end of the time: Slurm sends SIGTERM to the tasks (at the end 300 to 360 s before: --signal), every process
# saves and ends, and the job, queued again (by --requeue; at the end of the time by the last lines), goes on from there, for the
# same command in the same work directory resumes. Of a task that dies the others say the name and the node, and end; started anew,
# the job goes on.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"

# --- what XLA and NCCL are told ---------------------------------------------------------------------------------------

# Collectives run beside computation that does not wait for them, where the scheduler can move them apart.
export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_latency_hiding_scheduler=true"
# JAX takes this share of each GPU's memory when it starts; the rest is for NCCL's buffers and the libraries.
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}"
# Programs compiled by an earlier start of the job are found again, on a folder that all nodes see.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.jax_cache}"
# NCCL says why when something is wrong. NCCL_DEBUG=INFO shows which network it chose: NET/IB is InfiniBand or RoCE, NET/Socket
# is Ethernet by TCP, tens of times slower.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# Set only where NCCL chooses wrongly; names differ from cluster to cluster (ip link, ibv_devices):
#   NCCL_SOCKET_IFNAME=eth0    the interface over which processes first meet
#   NCCL_IB_HCA=mlx5           the adapters for data

# --- the processes: as sprl/parallel/processes.py is told of them ----------------------------------------------------------

# Process 0 is on the first node. Two jobs that share a node must not share a port.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export SPRL_COORDINATOR=${nodes%%$'\n'*}:$((20000 + SLURM_JOB_ID % 20000)) SPRL_PROCESSES=$SLURM_NTASKS

status=0
# shellcheck disable=SC2016 # each task's own number, known to the task alone
srun --kill-on-bad-exit=1 --label bash -c 'SPRL_PROCESS=$SLURM_PROCID exec "$@"' task \
  "${VENV:-.venv}/bin/python" -m sprl.main "$@" || status=$?

# A run that a signal ended has saved and says 0, as one that is complete does; the time that is left tells them apart.
# The signal may come 60 s early, and saving may take no time: 390 is beyond both. A run that was complete ends at once again.
if [ "$status" -eq 0 ] && [ $((${SLURM_JOB_END_TIME:-0} - $(date +%s))) -lt 390 ] && [ -n "${SLURM_JOB_END_TIME:-}" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
