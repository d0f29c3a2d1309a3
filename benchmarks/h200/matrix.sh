#!/usr/bin/env bash
# 200 s, at most 270; one GPU and 16 cores: every hacking case and its honest twin put to all detectors.
# Arguments: "N/M", the N-th of M parts for M GPUs (1/1), then a comma and what the names of cases contain ("1/4,memory"; all), or
# "own" for the cases that need a GPU, and how often each is judged (1/2,own,20). MATRIX_S: seconds at most (255).
# Lines that are in the results file are not made again. Parts of one GPU each write files of their own, to be put together with cat.
set -uo pipefail
IFS=, read -r part only repeats <<<"${1:-1/1}"
name=matrix-${only:+$only-}${part//\//-of-}
own=()
[ "${only:-}" != own ] || { own=(--own) && only=''; }
python=${PYTHON:-python3} device=${DEVICE:-cuda}
timeout 60 "$python" -c "
import torch, tests.adversarial.matrix
assert '$device' == 'cpu' or torch.cuda.is_available()" || exit 1
timeout -k 10 "${MATRIX_S:-255}" "$python" -m tests.adversarial.matrix --device "$device" --jobs "${JOBS:-10}" --part "$part" \
    --only "${only:-}" "${own[@]}" --repeats "${repeats:-1}" --out "$OUT/h200-$name.jsonl" >"$OUT/$name.txt" 2>&1
code=$?
grep -v '^[0-9]*/[0-9]* ' "$OUT/$name.txt" | tail -30 | cut -c1-300
exit $code
