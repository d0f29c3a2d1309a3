#!/usr/bin/env bash
# 460 s, at most 540; one GPU and 16 cores: what gets past the judge among mutants, then how often honest twins are refused meanwhile.
# Arguments: mutants and the number of the first, and rounds of 40 twins (500,0,0). Eight processes judge side by side, 8 s a candidate.
# SIEGE_S: seconds at most for each of the two (440).
set -uo pipefail
IFS=, read -r mutants first rounds <<<"${1:-500,0,0}"
python=${PYTHON:-python3} device=${DEVICE:-cuda} limit=${SIEGE_S:-440}
timeout 60 "$python" - <<PY || exit 1
import torch
from benchmarks.siege import judging
assert "$device" == "cpu" or torch.cuda.is_available()
PY
code=0
besiege() { # NAME ARGUMENTS...
    local name=$1
    shift
    timeout -k 10 $((limit + 60)) "$python" -m benchmarks.siege --device "$device" --jobs "${JOBS:-8}" --forked --total-limit-s "$limit" \
        "$@" --out "$OUT/h200-siege-$name.json" >"$OUT/siege-$name.txt" 2>&1 || code=1
    tail -12 "$OUT/siege-$name.txt" | cut -c1-300
}
[ "$mutants" -eq 0 ] || besiege mutants --count "$mutants" --first "${first:-0}"
# The machine is busy by the judging itself: three processes of each of eight judges on 16 cores.
[ "${rounds:-0}" -eq 0 ] || besiege twins --sides twins --count 40 --rounds "$rounds"
exit $code
