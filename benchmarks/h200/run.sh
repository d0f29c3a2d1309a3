#!/usr/bin/env bash
# Runs parts of the GPU measurements, from a checkout:  benchmarks/h200/run.sh OUT PLAN
#
# PLAN is a file of lines, each a lane: a GPU's number (`0`, `1,2` or `all`) and the parts it runs one after another. Lanes run side by
# side, each with cache folders and (for one GPU) a share of the cores of its own; a line `--` waits until all above have ended. A part
# is a file of this folder without its ending, with its arguments after a colon: `0 launcher_overhead models:lstm,unet`. plans/ has
# those for four GPUs, and for two those whose name ends in 2. Results and logs go to OUT.
#
# Needs Python 3.11+, torch >= 2.11 with CUDA, triton, pytest and a C++ compiler; no network. A set-up that does not work ends it before
# any GPU time is spent. It changes no setting of the GPU. KERNELBENCH names a checkout of KernelBench where a part wants one; with
# ARCHIVE=FILE all of OUT is packed into that file every 15 seconds, for machines that may be taken away; ARCHIVE_WITHOUT='*.safetensors'
# leaves files out, such as a live run's checkpoints of 36 MB a seed, which only a run that goes on needs.
set -uo pipefail

out=${1:?usage: benchmarks/h200/run.sh OUT PLAN}
plan=$(realpath "${2:?usage: benchmarks/h200/run.sh OUT PLAN}")
parts=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$parts/../.." && pwd)
mkdir -p "$out"
OUT=$(cd "$out" && pwd)
work=$(mktemp -d)
export OUT PYTHON=${PYTHON:-python3} PYTHONUNBUFFERED=1 COLUMNS=200 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
cd "$root" || exit 2

check_plan() { # every part is a file, every lane a GPU
    local gpus lane rest part
    gpus=$(nvidia-smi -L | wc -l)
    while read -r lane rest; do
        case $lane in '' | '#'* | --) continue ;; esac
        for gpu in ${lane//,/ }; do
            [ "$gpu" = all ] || [ "$gpu" -lt "$gpus" ] || { echo "lane '$lane': expected GPUs below $gpus or 'all'" && return 1; }
        done
        for part in $rest; do
            [ -f "$parts/${part%%:*}.sh" ] || { echo "part '$part' is no file of $parts" && return 1; }
        done
    done <"$plan"
}

set_up() { # the extension, and the entry points that torch.compile finds the backend by
    "$PYTHON" setup.py -q build_ext --inplace >"$OUT/build.log" 2>&1 && "$PYTHON" setup.py -q egg_info >>"$OUT/build.log" 2>&1 ||
        { tail -5 "$OUT/build.log" && return 1; }
    timeout 120 "$PYTHON" - <<'PY'
import platform, tempfile
import torch, triton
import cudal1
from torch_cudal1.core import native
print("python", platform.python_version(), "torch", torch.__version__, "triton", triton.__version__, torch.cuda.get_device_name())
assert native.status()[0], native.status()
model, x = torch.nn.Linear(64, 64).cuda().eval(), torch.randn(8, 64, device="cuda")
with torch.no_grad(), tempfile.TemporaryDirectory() as cache:
    assert torch.allclose(model(x), cudal1.accelerate(model, (x,), cache_dir=cache)(x)), "accelerate answers wrongly"
PY
}

part() { # name:arguments
    local name=${1%%:*} arguments='' code
    [ "$name" = "$1" ] || arguments=${1#*:}
    local begin=$SECONDS
    bash "$parts/$name.sh" ${arguments:+"$arguments"} >"$OUT/$name${arguments:+-${arguments//[^A-Za-z0-9]/_}}.console" 2>&1
    code=$?
    echo "GPU ${CUDA_VISIBLE_DEVICES:-all}: $1 ended with $code after $((SECONDS - begin)) s"
    return $code
}

own_cores() { # a lane of one GPU neither compiles nor times on the cores of another
    local gpus share
    gpus=$(nvidia-smi -L | wc -l)
    share=$(($(nproc --all) / gpus))
    [[ $1 =~ ^[0-9]+$ && $gpus -gt 1 && $share -gt 0 ]] || return 0
    taskset -cp "$(($1 * share))-$((($1 + 1) * share - 1))" "$BASHPID" >/dev/null 2>&1 || echo "GPU $1: no cores of its own"
}

lane() { # GPU parts...
    local folder="$work/lane-$1" code=0
    [ "$1" = all ] || export CUDA_VISIBLE_DEVICES=$1
    own_cores "$1"
    shift
    export TORCH_CUDAL1_CACHE_DIR=$folder/cudal1 TORCHINDUCTOR_CACHE_DIR=$folder/inductor TRITON_CACHE_DIR=$folder/triton
    for one in "$@"; do part "$one" || code=1; done
    return $code
}

archive() { tar czf "$ARCHIVE.new" ${ARCHIVE_WITHOUT:+"--exclude=$ARCHIVE_WITHOUT"} -C "$OUT" . && mv "$ARCHIVE.new" "$ARCHIVE"; }

check_plan || exit 2
set_up 2>&1 | tee "$OUT/set_up.txt"
if [ "${PIPESTATUS[0]}" -ne 0 ]; then
    echo "the set-up does not work: nothing was run"
    exit 1
fi
if [ -n "${ARCHIVE:-}" ]; then
    (while sleep 15; do archive; done) >/dev/null 2>&1 & # whoever reads our output need not wait for its last sleep
    keeper=$!
fi
status=0
lanes=()
join() {
    for pid in "${lanes[@]}"; do wait "$pid" || status=1; done
    lanes=()
}
while read -r gpu rest; do
    case $gpu in
    '' | '#'*) ;;
    --) join ;;
    *) # shellcheck disable=SC2086  # words of the plan
        lane "$gpu" $rest </dev/null &
        lanes+=($!)
        ;;
    esac
done <"$plan"
join
if [ -n "${ARCHIVE:-}" ]; then
    kill "$keeper"
    archive
fi
rm -rf "$work"
exit $status
