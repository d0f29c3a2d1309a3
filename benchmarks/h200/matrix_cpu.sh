#!/usr/bin/env bash
# 390 s a call, many calls; no GPU: every hacking case that needs no GPU and its honest twin, 20 times each: 4,120 judgements, some 2 s
# of a core or more each.
# Arguments: repeats and processes (20,24). Lines that are in the results file are not made again.
set -uo pipefail
IFS=, read -r repeats jobs <<<"${1:-20,24}"
CUDA_VISIBLE_DEVICES='' timeout -k 10 390 "${PYTHON:-python3}" -m tests.adversarial.matrix --device cpu --jobs "${jobs:-24}" \
    --repeats "$repeats" --out "$OUT/cpu-repeats.jsonl" >"$OUT/matrix_cpu.txt" 2>&1
code=$?
grep -v '^[0-9]*/[0-9]* ' "$OUT/matrix_cpu.txt" | tail -30 | cut -c1-300
exit $code
