#!/usr/bin/env bash
# 250 s for two models, at most 350; one GPU and its share of the cores: whole models, inference and one training step, full sizes,
# beside eager, torch.compile and reduce-overhead. Shows: all right, none below 0.98x of the better of eager and torch.compile; and of
# every contender of a race why it does not run.
# Argument: models, separated by commas (see benchmarks/README.md). On four GPUs alone on the host:
#   0 models:lstm,unet / 1 models:resnet50,vit_b16 / 2 models:bert_base,bert_base_b1 / 3 models:llama
set -uo pipefail
models=${1:-lstm,unet,resnet50,vit_b16,bert_base,bert_base_b1,llama,llama_bf16,bert_base_bf16,feed_forward} python=${PYTHON:-python3} device=${DEVICE:-cuda}
sizes=${SIZES:-full} phases=${PHASES:-inference,train} budget_s=${BUDGET_S:-15} rounds=${ROUNDS:-40}
IFS=, read -ra names <<<"$models"
each_s=${EACH_S:-130} total_s=$((${PREFILL_S:-90} + 115 * ${#names[@]}))
name=h200-models-${models//,/_}

timeout 60 "$python" - "$device" <<'PY' || exit 1
import sys
import torch, cudal1, benchmarks.bench_models
assert sys.argv[1] == "cpu" or torch.cuda.is_available(), "no GPU"
PY
timeout -k 10 $((total_s + 30)) "$python" -m benchmarks.bench_models --device "$device" --sizes "$sizes" \
    --phases "$phases" --models "$models" --budget-s "$budget_s" --rounds "$rounds" --more-s "${MORE_S:-10}" --time-limit-s "$each_s" \
    --total-limit-s "$total_s" --prefill-limit-s "${PREFILL_S:-90}" ${PREFILL---prefill} --out "$OUT/$name.json" \
    >"$OUT/$name.txt" 2>&1
code=$?
grep -E "^caches|^case|inference|train" "$OUT/$name.txt" | cut -c1-190 | tail -$((2 + 9 * ${#names[@]} + 2))
# What decided, a line a model: the races, their failures, and what was measured in place.
"$python" - "$OUT/$name.json" <<'PY' | tee -a "$OUT/$name.txt"
import json, sys
for row in json.load(open(sys.argv[1]))["rows"]:
    for one in row.get("decisions", ()):
        if one["what"] in ("baselines", "end_to_end", "in_place", "seconds", "sandbox", "fallback", "left_out", "runs"):
            print(row["model"], row["phase"], row["contender"], json.dumps(one)[:700])
PY
exit $code
