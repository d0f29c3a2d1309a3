#!/usr/bin/env bash
# 220 s, at most 290; one GPU, nothing else on the host: what a judgement costs (goal: 3 s), and one kernel against itself.
# Argument: candidates of each form after the first (1).
set -uo pipefail
python=${PYTHON:-python3} device=${DEVICE:-cuda}
timeout 60 "$python" - <<PY || exit 1
import torch
from benchmarks import bench_judge, repeatability
assert "$device" == "cpu" or torch.cuda.is_available()
PY
timeout -k 10 150 "$python" -m benchmarks.bench_judge --device "$device" --repeats "${1:-1}" --out "$OUT/h200-judge.json" \
    >"$OUT/bench_judge.txt" 2>&1
code=$?
cat "$OUT/bench_judge.txt"
timeout -k 10 130 "$python" -m benchmarks.repeatability --device "$device" --out "$OUT/h200-repeatability.json" \
    >"$OUT/repeatability.txt" 2>&1 || code=1
tail -30 "$OUT/repeatability.txt" | cut -c1-200
exit $code
