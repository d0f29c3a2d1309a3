#!/usr/bin/env bash
# 190 s, at most 220; one GPU and 16 cores: the other kernel families against eager, torch.compile and a copy of their bytes.
# Argument: families or cases separated by commas ("softmax,scan"; default: all, about 6 s a case).
set -uo pipefail
mapfile -d, -t names < <(printf '%s' "${1:-}")
only=()
for name in "${names[@]}"; do only+=(--only "$name"); done
timeout 30 "${PYTHON:-python3}" -c "import torch; assert torch.cuda.is_available()" || exit 1
timeout -k 10 205 "${PYTHON:-python3}" -m benchmarks.bench_families "${only[@]}" --budget-s "${BUDGET:-180}" --out "$OUT/h200-families.json" \
    >"$OUT/families.txt" 2>&1
code=$?
tail -50 "$OUT/families.txt" | cut -c1-200
exit $code
