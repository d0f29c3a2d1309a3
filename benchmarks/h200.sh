#!/usr/bin/env bash
# Smoke test, GPU tests and benchmarks on one NVIDIA GPU, from a checkout:  benchmarks/h200.sh OUT [smoke|tests|models|warm|all]
#
# Needs Python 3.11+, torch >= 2.11 with CUDA, triton, pytest; no network. Results and logs go to OUT. It stops at the smoke test if
# something basic is wrong, so that GPU time is not spent on a broken set-up; a failure of a later step does not stop the next one.
# It changes no setting of the GPU. Limits in seconds can be set from outside: TESTS_LIMIT_S, MODELS_LIMIT_S, WARM_LIMIT_S.
set -uo pipefail

out=${1:?usage: benchmarks/h200.sh OUT [smoke|tests|models|warm|all]}
step=${2:-all}
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$root" || exit 2
export PYTHONUNBUFFERED=1
status=0

# Installed if that works offline (it registers the torch.compile entry point); the checkout on PYTHONPATH otherwise.
install() {
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    if timeout 120 "$python" -m pip install -q --no-index --no-deps --no-build-isolation -e . >"$out/install.log" 2>&1; then
        echo "installed from the checkout"
    else
        echo "not installed (see install.log): the package runs from PYTHONPATH, without its entry points"
    fi
}

smoke() {
    timeout 150 "$python" - <<'PY'
import platform, sys, tempfile, time
import torch, triton
print("python", platform.python_version(), "torch", torch.__version__, "triton", triton.__version__)
if not torch.cuda.is_available():
    sys.exit("no CUDA device: torch.cuda.is_available() is False")
print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
import cudal1
import benchmarks.bench_models, benchmarks.bench_warm_start
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.LayerNorm(512), torch.nn.Linear(512, 64)).cuda().eval()
x = torch.randn(128, 256, device="cuda")
with torch.no_grad(), tempfile.TemporaryDirectory() as cache:
    exact = model.double()(x.double())
    model.float()
    expected = model(x)
    begin = time.perf_counter()
    fast = cudal1.accelerate(model, (x,), on_miss="tune", budget_s=20.0, cache_dir=cache)
    got = fast(x)
    torch.cuda.synchronize()
    rms = lambda y: float((y.double() - exact).square().mean().sqrt())
    print(f"accelerate: {time.perf_counter() - begin:.1f} s, error {rms(got):.3g}, eager's {rms(expected):.3g}")
    print(cudal1.report())
    if not rms(got) <= 2 * rms(expected) + 1e-7 * float(exact.square().mean().sqrt()):
        sys.exit("the accelerated model is less accurate than the contract allows")
PY
}

run() {  # name, limit in seconds, command...
    local name=$1 limit=$2 code=0
    shift 2
    echo "== $name"
    timeout "$limit" "$@" 2>&1 | tee "$out/$name.log"
    code=${PIPESTATUS[0]}
    echo "== $name ended with code $code after $SECONDS s"
    [ "$code" -eq 0 ] || status=1
}

install
echo "== smoke"
smoke 2>&1 | tee "$out/smoke.log"
if [ "${PIPESTATUS[0]}" -ne 0 ]; then
    echo "the smoke test failed: nothing else was run"
    exit 1
fi

models_s=${MODELS_LIMIT_S:-470}
warm_s=${WARM_LIMIT_S:-240}
case $step in
smoke) ;;
tests | models | warm | all) ;;
*) echo "step is '$step'; expected smoke, tests, models, warm or all" && exit 2 ;;
esac
case $step in tests | all) run gpu_tests "${TESTS_LIMIT_S:-240}" "$python" -m pytest -q -m gpu tests ;; esac
case $step in models | all)
    run bench_models $((models_s + 60)) "$python" -m benchmarks.bench_models --device cuda --sizes full \
        --total-limit-s "$models_s" --out "$out/models.json" ;;
esac
case $step in warm | all)
    run bench_warm_start $((warm_s + 60)) "$python" -m benchmarks.bench_warm_start --device cuda --sizes full \
        --total-limit-s "$warm_s" --out "$out/warm_start.json" ;;
esac
exit $status
