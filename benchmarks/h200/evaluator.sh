#!/usr/bin/env bash
# 130 s, at most 190; one GPU and 16 cores: new programs a second that the training evaluator judges, beside the goal of 10.
# Argument: seconds for all runs together (100). Runs that are in the results file are not done again.
set -uo pipefail
seconds=${1:-100} device=${DEVICE:-cuda} python=${PYTHON:-python3}
gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
lanes=$(($(nproc --all) / (gpus > 0 ? gpus : 1) - 2))
[ "$lanes" -gt 12 ] && lanes=12 # each begins with three processes of 4 s, one after the other
[ "$lanes" -lt 2 ] && lanes=2
timeout 60 "$python" - "$device" <<'PY' || exit 1
import sys
import torch, torch_cudal1.judge.pool.slots
assert sys.argv[1] == "cpu" or torch.cuda.is_available(), "no GPU"
PY
timeout -s INT -k 10 $((seconds + 75)) "$python" -m benchmarks.bench_evaluator --device "$device" --lanes "$lanes" --trusts own \
    --shape "${SHAPE:-4096,2048}" --budget-s "$seconds" --out "$OUT/h200-evaluator.json" >"$OUT/evaluator.txt" 2>&1
code=$?
nvidia-smi --query-gpu=index,memory.used,memory.total --format=csv,noheader 2>/dev/null >>"$OUT/evaluator.txt"
tail -4 "$OUT/evaluator.txt" | cut -c1-2000
exit $code
