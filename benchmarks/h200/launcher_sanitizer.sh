#!/usr/bin/env bash
# 100 s, at most 270; one GPU and 8 cores: compute-sanitizer over the tests of launcher, replay and captured graphs, with two controls.
# Shows: memcheck (also with an allocation for each tensor) and racecheck are clean to their end, and each control is seen by its tool.
set -uo pipefail
python=${PYTHON:-python3} log=$OUT/launcher_sanitizer.txt
tool=${SANITIZER:-$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer)}
timeout 30 "$python" -c "import torch; from torch_cudal1.core import native; assert torch.cuda.is_available() and native.status()[0], native.status()" ||
    exit 1
work=$(mktemp -d)
: >"$log"

cat >"$work/control.py" <<'PY'
"""A launch that a tool must see, through the launcher itself: `memory` reads far beyond its input, `race` shares without a barrier."""
import dataclasses, sys
import torch
from benchmarks import bound
from torch_cudal1.ir.interpreter import prepare
from torch_cudal1.ir.program import Alloc, Launch, LaunchArg, Program, TensorSpec, Value
from torch_cudal1.device.cuda.nvrtc import Built, compile_cuda

RACE = """
extern "C" __global__ void race(const float* x, float* out) {
  __shared__ float held[256];
  held[threadIdx.x] = x[threadIdx.x];
  out[threadIdx.x] = held[255 - threadIdx.x];
}
"""

def racing(major, minor):
    built = compile_cuda(RACE, f"sm_{major}{minor}")
    assert isinstance(built, Built), built
    spec = TensorSpec("float32", (256,), (1,), "cuda")
    launch = Launch("k", "race", (1, 1, 1), 256, 0, (LaunchArg("ptr", Value(0)), LaunchArg("ptr", Value(1))))
    return Program((spec,), (Alloc(1, spec), launch), (1,), payloads={"k": torch.frombuffer(bytearray(built.cubin), dtype=torch.uint8)})

def beyond(x):
    def far(step):
        if not isinstance(step, Launch):
            return step
        args = tuple(LaunchArg("i32", 4096 * 1024) if arg.kind == "i32" else arg for arg in step.args)
        return dataclasses.replace(step, grid=(4096, 1, 1), args=args)
    good = bound.chain(x, 2)
    return dataclasses.replace(good, steps=tuple(map(far, good.steps)))

if __name__ == "__main__":
    x = torch.ones(256 if sys.argv[1] == "race" else 4096, device="cuda")
    program = racing(*torch.cuda.get_device_capability()) if sys.argv[1] == "race" else beyond(x)
    prepare(program, x.device)([x])
    torch.cuda.synchronize()
PY

# name, limit in seconds, tool, command: the tool's output to the log, its exit code on the last line
run() {
    local name=$1 limit=$2 kind=$3 begin=$SECONDS
    shift 3
    timeout -k 5 "$limit" "$tool" --tool "$kind" --error-exitcode 86 --print-limit 3 "$@" >"$work/$name" 2>&1
    echo "exit code $?, $((SECONDS - begin)) s" >>"$work/$name"
}
tests() { # name, limit, tool, tests to take (-k), files
    local name=$1 limit=$2 kind=$3 which=$4
    shift 4
    run "$name" "$limit" "$kind" "$python" -m pytest -q -p no:cacheprovider -n 0 -m gpu -k "$which" "$@"
}
launch=tests/runtime/test_launch.py replay=tests/runtime/test_cuda_graph.py captured=tests/runtime/test_captured.py
tests memcheck 120 memcheck "not ten_thousand and not threads" $launch $replay $captured &
# Racecheck looks at every access to shared memory: few calls of each kind suffice, and large tensors only take its time.
tests racecheck 220 racecheck "(agree or chain or held_outputs or fills or user_s_capture) and not threads and not 4194304" $launch $replay $captured &
# Nothing can be captured without PyTorch's allocator, but then a step beyond any tensor is a step beyond an allocation.
PYTORCH_NO_CUDA_MEMORY_CACHING=1 tests uncached 120 memcheck "agree or freed or bad_input" $launch &
PYTORCH_NO_CUDA_MEMORY_CACHING=1 run memory 90 memcheck "$python" "$work/control.py" memory &
run race 90 racecheck "$python" "$work/control.py" race &
wait
for name in memcheck racecheck uncached memory race; do
    echo "== $name"
    grep -v "^=========     \(Host\|in\|at\|Saved\)" "$work/$name" | tail -15 | cut -c1-200
done >>"$log"

code=0
expect() { # name, what its output must hold, what that means
    if grep -qE "$2" "$work/$1"; then echo "$1: $3"; else
        echo "$1: EXPECTED '$2'"
        code=1
    fi
}
{
    echo "== verdict"
    for name in memcheck racecheck uncached; do
        expect $name '^exit code 0,' "ended by itself without a failure"
        expect $name '[.][.][.]' "tests ran"
    done
    expect memcheck 'ERROR SUMMARY: 0 errors' clean
    expect uncached 'ERROR SUMMARY: 0 errors' clean
    expect racecheck 'RACECHECK SUMMARY: 0 hazards displayed' clean
    expect memory 'Invalid __global__ (read|write)' "the control is seen"
    expect race 'RACECHECK SUMMARY: [1-9][0-9]* hazard' "the control is seen"
} >>"$log"
rm -rf "$work"
cat "$log"
exit $code
