#!/usr/bin/env bash
# 240 s, at most 400; no GPU, two cores: what a policy learns from an evaluator that can be cheated and from the judge, in replay of OUT's
# landscape. Argument: seconds at most (400). Goes on where OUT says it was.
set -uo pipefail
seconds=${1:-400} python=${PYTHON:-python3} plan=${REDTEAM_PLAN:-benchmarks/training/h200-redteam.json}
[ -f "$OUT/h200-landscape.json.gz" ] && cp "$OUT/h200-landscape.json.gz" benchmarks/training/
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
timeout -s INT -k 5 "$seconds" nice -n 5 "$python" -m torch_cudal1 train demo --plan "$plan" --run "$OUT/redteam" \
    --workers 1 --out "$OUT/redteam.html" --json >"$OUT/redteam.json" 2>"$OUT/redteam.txt"
timeout 60 "$python" -m benchmarks.bench_training --plan "$plan" --told "$OUT/redteam.json" --out "$OUT/h200-training-redteam.json" 2>&1 |
    tee -a "$OUT/redteam.txt"
exit "${PIPESTATUS[0]}"
