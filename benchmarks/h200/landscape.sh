#!/usr/bin/env bash
# As long as it is given, and 60 s more at most; a GPU and 16 cores for each part: every program of a closed set of tasks, judged once.
# Argument: PART/PARTS,SECONDS (1/1,300), a part for each GPU of a kind; then `join`, 30 s on any machine, which puts all parts in OUT
# together, and the folders of earlier ones that LANDSCAPE_PARTS names. Goes on from what OUT holds of the part, and from rows.jsonl
# of earlier machines that LANDSCAPE_ROWS names, each with its landscape.json.gz beside it, if they were measured in the same way.
set -uo pipefail
given=${1:-1/1,300} device=${DEVICE:-cuda} python=${PYTHON:-python3}
read -ra earlier <<<"${LANDSCAPE_ROWS:-}"
if [ "$given" = join ]; then
    # shellcheck disable=SC2086  # LANDSCAPE_PARTS is a list of folders
    timeout 120 "$python" -m torch_cudal1.training.landscape --device "$device" --out "$OUT/landscape" \
        --join "$OUT"/landscape-*of*/ ${LANDSCAPE_PARTS:-} >"$OUT/landscape.txt" 2>&1 || { tail -5 "$OUT/landscape.txt" && exit 1; }
    cp "$OUT/landscape/landscape.json.gz" "$OUT/h200-landscape.json.gz"
    tail -1 "$OUT/landscape.txt"
    exit
fi
part=${given%%,*} seconds=${given#*,}
name=landscape-${part/\//of}
gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
lanes=$(($(nproc --all) / (gpus > 0 ? gpus : 1) - 2))
[ "$lanes" -gt 12 ] && lanes=12 # each begins with three processes of 4 s, one after the other
[ "$lanes" -lt 2 ] && lanes=2
# shellcheck disable=SC2086  # ONLY is a list of operations
timeout -s INT -k 10 $((seconds + 50)) "$python" -m torch_cudal1.training.landscape --device "$device" --lanes "$lanes" \
    --budget-s "$seconds" --part "$part" --out "$OUT/$name" ${earlier[0]+--resume "${earlier[@]}"} ${ONLY:+--only $ONLY} \
    >"$OUT/$name.txt" 2>&1
code=$?
tail -2 "$OUT/$name.txt" | cut -c1-2000
exit $code
