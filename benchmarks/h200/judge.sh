#!/usr/bin/env bash
# 330 s, at most 480; one GPU, nothing else on it: what a judgement costs (goal: 3 s), one source and one kernel against themselves.
# Argument: candidates of each form after the first (1).
set -uo pipefail
python=${PYTHON:-python3} device=${DEVICE:-cuda}
timeout 60 "$python" - <<PY || exit 1
import torch
from benchmarks import bench_judge, bench_same_source, repeatability
assert "$device" == "cpu" or torch.cuda.is_available()
PY
code=0
measure() { # SECONDS MODULE RESULTS ARGUMENTS...
    local seconds=$1 module=$2 results=$3
    shift 3
    timeout -k 10 "$seconds" "$python" -m "benchmarks.$module" --device "$device" "$@" --out "$OUT/h200-$results.json" >"$OUT/$module.txt" 2>&1 || code=1
    tail -30 "$OUT/$module.txt" | cut -c1-200
}
measure 210 bench_judge judge --repeats "${1:-1}" --forms source Program
measure 140 bench_same_source same-source --trials 30
measure 120 repeatability repeatability
exit $code
