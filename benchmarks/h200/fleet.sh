#!/usr/bin/env bash
# 210 s, at most 270; 4 GPUs with 16 cores each, nothing else beside it: `cudal1 warmup` with 4, 1 and 2 of them, or with COUNTS=1.
# Shows: tasks finished per second, starts of the workers included, and how many candidates were judged on the way.
set -uo pipefail
python=${PYTHON:-python3} devices=${DEVICES:-gpu} counts=${COUNTS:-4,1,2}
timeout 60 "$python" - "$devices" "$counts" <<'PY' || exit 1
import sys
import torch, benchmarks.bench_fleet
most = max(map(int, sys.argv[2].split(",")))
assert sys.argv[1] == "cpu" or torch.cuda.device_count() >= most, f"needs {most} GPUs, torch finds {torch.cuda.device_count()}"
PY
timeout -k 10 260 "$python" -m benchmarks.bench_fleet --devices "$devices" --counts "$counts" --tasks-per-worker "${TASKS:-2}" \
    --cores-per-device "${CORES:-16}" --budget-s "${BUDGET_S:-10}" --time-limit-s 85 --total-limit-s 240 --out "$OUT/h200-fleet.json" \
    >"$OUT/fleet.txt" 2>&1
code=$?
tail -5 "$OUT/fleet.txt" | cut -c1-400
exit $code
