#!/usr/bin/env bash
# 170 s, at most 225; one GPU: process start to the first answer of a BERT-base, cold once, warm up to three times, contenders in turns.
# Shows: a warm start is not slower than torch.compile's with its own warm cache; nothing built, judged or searched in it (counted).
# Argument: models, separated by commas (bert_base_b1).
set -uo pipefail
models=${1:-bert_base_b1} python=${PYTHON:-python3} device=${DEVICE:-cuda}
timeout 60 "$python" - "$device" <<'PY' || exit 1
import sys
import torch, benchmarks.bench_warm_start
assert sys.argv[1] == "cpu" or torch.cuda.is_available(), "no GPU"
PY
timeout -k 10 215 "$python" -m benchmarks.bench_warm_start --device "$device" --sizes "${SIZES:-full}" --models "$models" --runs 3 \
    --budget-s 4 --contenders "torch.compile,cudal1.accelerate,cudal1 backend" --time-limit-s 90 --total-limit-s 200 \
    --out "$OUT/h200-warm-start.json" >"$OUT/warm.txt" 2>&1
code=$?
cut -c1-400 "$OUT/warm.txt" | tail -6
exit $code
