#!/usr/bin/env bash
# Several processes of one run on this machine: for a node whose GPUs are to have a process each, and to try things out on a CPU.
#
#   launch/local.sh PROCESSES COMMAND...      launch/local.sh 8 python -m sprl.main --config=configs/qwen_gsm8k.py
#
# One process drives all GPUs of a node by itself: this is needed only where several are wanted. Each line of output is marked
# with its process. The first that fails ends the others, and its exit status is the script's; a SIGTERM or SIGINT becomes a
# SIGTERM to all, which save and end. The same command, with this or another number, goes on from the last checkpoint.
set -euo pipefail

if [ $# -lt 2 ] || ! [ "$1" -ge 1 ] 2>/dev/null; then
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
processes=$1
shift

# A port of this machine that is free now.
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
export SPRL_COORDINATOR=localhost:$port SPRL_PROCESSES=$processes

# The GPUs are dealt out evenly. CUDA_VISIBLE_DEVICES, where it is set, says which.
gpus=()
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
  IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
elif command -v nvidia-smi >/dev/null; then
  mapfile -t gpus < <(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null)
fi
if [ ${#gpus[@]} -gt 0 ] && [ $((${#gpus[@]} % processes)) -ne 0 ]; then
  echo "launch/local.sh: ${#gpus[@]} GPUs (${gpus[*]}) cannot be dealt out evenly to $processes processes" >&2
  exit 2
fi
each=$((${#gpus[@]} / processes))

pids=()
for ((i = 0; i < processes; i++)); do
  (
    if [ "$each" -gt 0 ]; then
      CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${gpus[*]:i * each:each}")
      export CUDA_VISIBLE_DEVICES
    fi
    SPRL_PROCESS=$i exec "$@" > >(sed -u "s/^/[$i] /") 2> >(sed -u "s/^/[$i] /" >&2)
  ) &
  pids+=($!)
done

end() { [ ${#pids[@]} -eq 0 ] || kill -TERM "${pids[@]}" 2>/dev/null || true; }
trap end TERM INT

# Looking every now and then, where `wait -n` forgets one of two that end at once.
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
  fi
  sleep 0.1
done
exit "$status"
