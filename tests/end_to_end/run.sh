#!/usr/bin/env bash
# End-to-end check on a real model: SmolLM2 trains on GSM8K for three steps, is killed in step 2 or 3, resumes, is evaluated and is
# exported. If SPRL_REFERENCE_PYTHON names a Python with transformers, transformers generates from the export.
#
#   GSM8K=FOLDER (default ../shared/data/gsm8k)   PYTHON=... (default .venv/bin/python)
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
gsm8k=${GSM8K:-../shared/data/gsm8k}
if [ ! -f "$gsm8k/train.jsonl" ]; then
  echo "SKIPPED: $gsm8k has no train.jsonl; GSM8K=FOLDER names a folder of train.jsonl and test.jsonl"
  exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
workdir=$folder/run
export JAX_PLATFORMS=cpu
export JAX_COMPILATION_CACHE_DIR=$folder/compiled # three processes compile the same functions

train() {
  exec "$python" -m sprl.main --config=configs/smollm2_gsm8k.py --workdir="$workdir" --config.task.path="$gsm8k" \
    --config.steps=3 --config.rollout.prompts=2 --config.rollout.group=4 --config.rollout.equal_groups=train \
    --config.sampling.max_tokens=48 --config.sampling.rows=8 --config.packing.row_tokens=448 --config.packing.rows=1 --config.model.remat=none \
    --config.eval.problems=2 --config.checkpoint.every=1 --config.checkpoint.keep_last=1 \
    --config.rollout.stop_when_capped=False
}

lines() { # number of logged steps
  grep -c '"kind": "train"' "$workdir/metrics.jsonl" 2>/dev/null || true
}

echo '--- train, kill after one step is saved and before the last'
(train) &
run=$!
until [ "$(lines)" = 2 ] || ! kill -0 "$run" 2>/dev/null; do sleep 0.05; done
kill -9 "$run" 2>/dev/null || true
wait "$run" && status=0 || status=$?
[ "$status" = 137 ] || { echo "the run ended with status $status before it was killed"; exit 1; }

echo '--- the same command again'
(train) 2>&1 | tee "$folder/log"
grep -q 'resuming after step' "$folder/log"

echo '--- evaluate and export'
"$python" -m sprl.evaluate --workdir="$workdir" --config.eval.problems=2 | tail -1
"$python" -m sprl.export --workdir="$workdir" --out="$folder/export"

echo '--- check the metrics'
"$python" - "$workdir" <<'PYTHON'
import math
import sys

from sprl.io.metrics import read_metrics
from sprl.kernels.platform import compute_dtype

# Sampler and learner agree to the rounding of the compute dtype of this machine.
rounding = {'float32': 1e-2, 'bfloat16': 0.5}[compute_dtype('auto').name]
records = [r for r in read_metrics(sys.argv[1]) if r['kind'] == 'train']
assert [r['step'] for r in records] == [1, 2, 3], records
for r in records:
  assert all(math.isfinite(value) for value in r.values() if isinstance(value, float)), r
  assert r['grading/ok'] == 8, r
  assert 0 <= r['reward/mean'] <= 1 and 0 < r['rollout_corr/abs_dlogp_max'] < rounding, r
print('steps 1 2 3: all metrics finite; rewards', *(r['reward/mean'] for r in records))
PYTHON

if [ -n "${SPRL_REFERENCE_PYTHON:-}" ]; then
  "$SPRL_REFERENCE_PYTHON" - "$folder/export" <<'PYTHON'
import sys

import transformers

tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype='float32')
chat = [{'role': 'user', 'content': 'What is 2 + 3?'}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors='pt', return_dict=True)
tokens = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt['input_ids'].shape[1] :]
text = tokenizer.decode(tokens, skip_special_tokens=True)
print('transformers generates from the export:', repr(text))
assert len(tokens) > 1 and '5' in text, text
PYTHON
else
  echo 'SPRL_REFERENCE_PYTHON is not set: transformers did not load the export'
fi
