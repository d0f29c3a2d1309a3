#!/usr/bin/env bash
# As long as it is given, and 30 s more at most; no GPU, as many cores as there are: arms of training in replay of the landscape in OUT.
# Argument: SECONDS,ARM,ARM,... (300,A6,A4,A5). Goes on where OUT says it was; more arms and seconds continue it.
set -uo pipefail
IFS=, read -ra given <<<"${1:-300,A6,A4,A5}"
seconds=${given[0]} python=${PYTHON:-python3} plan=${REPLAY_PLAN:-benchmarks/training/h200-replay.json}
[ -f "$OUT/h200-landscape.json.gz" ] && cp "$OUT/h200-landscape.json.gz" benchmarks/training/
mkdir -p "$OUT/replay"
"$python" - "$plan" "${given[@]:1}" >"$OUT/replay/plan.json" <<'PY' || exit 1
import json, sys
plan = json.load(open(sys.argv[1]))
print(json.dumps(plan | ({"arms": sys.argv[2:]} if sys.argv[2:] else {})))
PY
workers=${WORKERS:-$(($(nproc) * 3 / 4))}
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
timeout -s INT -k 5 $((seconds + 20)) nice -n 5 "$python" -m torch_cudal1 train experiment --plan "$OUT/replay/plan.json" --run "$OUT/replay" \
    --workers "$workers" --budget-s "$seconds" --out "$OUT/replay.html" --json >"$OUT/replay.json" 2>"$OUT/replay.txt"
timeout 60 "$python" -m benchmarks.bench_training --plan "$OUT/replay/plan.json" --told "$OUT/replay.json" \
    --out "$OUT/h200-training-replay.json" --figure "$OUT/h200-training-replay.svg" 2>&1 | tee -a "$OUT/replay.txt"
exit "${PIPESTATUS[0]}"
