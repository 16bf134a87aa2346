#!/usr/bin/env bash
# Starts several processes of one run on this machine.
#
#   launch/local.sh PROCESSES COMMAND...      launch/local.sh 8 python -m sprl.main --config=configs/qwen_gsm8k.py
#
# One process can use all GPUs of a node. Use this script to give each process its own GPUs, or to try several processes on a CPU.
# Each line of output starts with the number of its process. When a process fails, the script ends the others and exits with the
# first failure's status. It kills a process that still runs 10 s later. SIGTERM, SIGINT and SIGHUP are sent to all processes as
# SIGTERM: each saves a checkpoint and exits. The same command resumes from the last checkpoint, also with another number of processes.
set -euo pipefail

if [ $# -lt 2 ] || ! [[ $1 =~ ^[0-9]+$ ]] || [ "$((10#$1))" -lt 1 ]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
processes=$((10#$1))
shift

# A free port of this machine.
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
export SPRL_COORDINATOR=localhost:$port SPRL_PROCESSES=$processes

# Each process gets the same number of GPUs: those of CUDA_VISIBLE_DEVICES, or all.
gpus=()
if [ "${JAX_PLATFORMS:-}" = cpu ] || [ "${CUDA_VISIBLE_DEVICES:-}" = -1 ]; then
  :
elif [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
  IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
elif command -v nvidia-smi >/dev/null; then
  # Without a driver or a device, nvidia-smi prints a sentence.
  mapfile -t gpus < <(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | grep -xE '[0-9]+')
fi
if [ ${#gpus[@]} -gt 0 ] && [ $((${#gpus[@]} % processes)) -ne 0 ]; then
  echo "launch/local.sh: ${#gpus[@]} GPUs (${gpus[*]}) cannot be divided evenly among $processes processes" >&2
  exit 2
fi
each=$((${#gpus[@]} / processes))

# `set -m` gives each process a group of its own. A signal to the group of this script, such as Ctrl-C, then reaches the process
# once, from `end`. The second SIGTERM would kill it while it saves.
prefix() {
  trap '' TERM INT HUP # also ignored by sed, which ends with the output of its process
  exec sed -u "s/^/[$i] /"
}
pids=()
set -m
for ((i = 0; i < processes; i++)); do
  (
    if [ "$each" -gt 0 ]; then
      CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${gpus[*]:i * each:each}")
      export CUDA_VISIBLE_DEVICES
    fi
    SPRL_PROCESS=$i exec "$@" > >(prefix) 2> >(prefix >&2)
  ) &
  pids+=($!)
done
set +m

end() { [ ${#pids[@]} -eq 0 ] || kill -TERM "${pids[@]}" 2>/dev/null || true; }
trap end TERM INT HUP

# Poll: `wait -n` misses one of two processes that end at the same time.
status=0
while [ ${#pids[@]} -gt 0 ]; do
  left=()
  for pid in "${pids[@]}"; do
    if kill -0 "$pid" 2>/dev/null; then
      left+=("$pid")
      continue
    fi
    code=0
    wait "$pid" || code=$?
    if [ "$code" -ne 0 ] && [ "$status" -eq 0 ]; then
      status=$code
      failed=yes
    fi
  done
  pids=("${left[@]}")
  if [ -n "${failed:-}" ]; then
    failed=
    end
    deadline=$((SECONDS + 10)) # for a process that does not react, such as one that hangs
  fi
  if [ ${#pids[@]} -gt 0 ] && [ "$SECONDS" -ge "${deadline:-$((SECONDS + 1))}" ]; then
    kill -KILL "${pids[@]}" 2>/dev/null || true
  fi
  sleep 0.1 || true # a signal to the group ends it
done
exit "$status"
