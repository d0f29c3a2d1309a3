#!/usr/bin/env bash
# As long as it is given, and 45 s more at most; a GPU and 16 cores for each seed: three stages of training, measured live.
# Argument: SEED,SECONDS (0,330); then `join`, 20 s, which makes results and a page of all seeds in OUT. Goes on where OUT says it was.
set -uo pipefail
given=${1:-0,330} python=${PYTHON:-python3} plan=${LIVE_PLAN:-benchmarks/training/h200-live.json}
if [ "$given" = join ]; then
    mkdir -p "$OUT/live/results"
    cp benchmarks/results/training-live/*.json "$OUT/live/results/" 2>/dev/null # of earlier machines; another plan's are passed over
    cp "$OUT"/live-seed-*/results/*.json "$OUT/live/results/" 2>/dev/null
    timeout 60 "$python" -m torch_cudal1 train report --plan "$plan" --run "$OUT/live" --out "$OUT/live.html" --json >"$OUT/live.json" 2>"$OUT/live.txt"
    timeout 60 "$python" -m benchmarks.bench_training --plan "$plan" --told "$OUT/live.json" --out "$OUT/gpu-training-live.json" 2>&1 | tee -a "$OUT/live.txt"
    exit "${PIPESTATUS[0]}"
fi
seed=${given%%,*} seconds=${given#*,}
device=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["device"])' "$plan") || exit 1
gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
lanes=$(($(nproc --all) / (gpus > 0 ? gpus : 1) - 2))
[ "$lanes" -gt 12 ] && lanes=12 # each begins with three processes of 4 s, one after the other
[ "$lanes" -lt 2 ] && lanes=2
timeout -s INT -k 10 $((seconds + 35)) "$python" -m torch_cudal1 train experiment --plan "$plan" --live --device "$device" --lanes "$lanes" \
    --seed "$seed" --run "$OUT/live-seed-$seed" --out "$OUT/live-seed-$seed.html" --budget-s "$seconds" >"$OUT/live-seed-$seed.txt" 2>&1
code=$?
tail -4 "$OUT/live-seed-$seed.txt"
exit $code
