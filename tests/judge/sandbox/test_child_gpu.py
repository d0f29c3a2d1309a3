"""The same confinement with a live GPU: what CUDA needs works, what is forbidden stays forbidden."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.sandbox import probe
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, make_limits
from torch_cudal1.judge.sandbox.confine import landlock, seccomp
from torch_cudal1.judge.wire.call_spec import CallSpec, pack_arguments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]
needs_landlock = pytest.mark.skipif(
    not landlock.find_version() or not seccomp.is_supported(),
    reason="no Landlock or no filter here: level 1 only",
)
CUDA = torch.device("cuda", 0)
CALL_SPEC = CallSpec(
    "ModelNew",
    pack_arguments({"args": [], "kwargs": {}}, None),
    (),
    pack_arguments({"args": [torch.ones(1)], "kwargs": {}}, []),
).to_json()
WORK = """
import torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x
def work():
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).cuda()
    layers(torch.randn(8, 3, 64, 64, device="cuda")).sum().backward()
    torch.linalg.svd(torch.randn(64, 64, device="cuda"))
    graph, still = torch.cuda.CUDAGraph(), torch.randn(512, 512, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = still @ still
    graph.replay()
    torch.cuda.synchronize()
work()
"""
COMPILED = """
import torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x
f = torch.compile(lambda x: torch.softmax(x * 2 + 1, -1))
x = torch.randn(64, 1000, device="cuda")
torch.testing.assert_close(f(x), torch.softmax(x * 2 + 1, -1))
"""
WORKERS = """
import torch
from torch._inductor.compile_worker.subproc_pool import SubprocPool
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x
pool = SubprocPool(2)
try:
    assert pool.submit(torch.cuda.is_available).result(timeout=100), "a compile worker sees no GPU"
finally:
    pool.shutdown()
"""
TAKE_ALL_MEMORY = "import torch\nhalf = torch.cuda.mem_get_info()[1] * 95 // 100\ntorch.empty(half, dtype=torch.uint8, device='cuda')"


def load_source(child: Child, text: str) -> None:
    child.call("load_source", slot="candidate", text=text, form=CALL_SPEC, way={})


@needs_landlock
@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("phase", ["build", "run"])
def test_acts_come_out_right_with_a_gpu(level: int, phase: str) -> None:
    limits = make_limits(Settings(), CUDA, trust="foreign", phase=phase)  # type: ignore[arg-type]
    probed = probe.probe_level(limits, level)
    print(probed.why)
    if level == 3 and probed.error and "namespace" in probed.error:
        pytest.skip(probed.error)
    assert probed.level == level, probed.why
    assert {c.name: c.detail for c in probed.controls}[
        "GPU"
    ] == "made a context, allocated, compiled, launched"


@needs_landlock
def test_own_code_with_a_gpu_is_confined_at_level_2() -> None:
    probed = probe.probe_level(make_limits(Settings(), CUDA), 2)
    assert probed.level == 2, probed.why


@needs_landlock
def test_foreign_code_works_on_the_gpu_in_the_run_phase() -> None:
    with Child(make_limits(Settings(), CUDA, trust="foreign", phase="run"), Contract()) as child:
        assert child.confinement.level >= 2, child.confinement
        load_source(child, WORK)
        with pytest.raises(CandidateFailure, match="PermissionError"):
            load_source(child, "import os; os.fork()")


@needs_landlock
@pytest.mark.parametrize("trust", ["own", "foreign"])
def test_triton_compiles_in_the_build_phase(trust: str) -> None:
    with Child(
        replace(make_limits(Settings(), CUDA, trust=trust), deadline_s=300.0), Contract()
    ) as child:  # type: ignore[arg-type]
        assert child.confinement.level >= 2, child.confinement
        load_source(child, COMPILED)


@needs_landlock
def test_pytorchs_share_of_the_gpu_is_capped_for_foreign_code() -> None:
    with Child(make_limits(Settings(), CUDA, trust="foreign", phase="run"), Contract()) as child:
        with pytest.raises(CandidateFailure, match="out of memory") as error_info:
            load_source(child, TAKE_ALL_MEMORY)
        assert error_info.value.detector == "resource"
        load_source(child, WORK)


@needs_landlock
def test_inductors_workers_in_a_child_for_own_code_see_the_gpu() -> None:
    """They ask CUDA in processes of their own, and compile nothing where there is no answer."""
    with Child(make_limits(Settings(), CUDA), Contract()) as child:
        assert child.confinement.level == 2, child.confinement.missing
        load_source(child, WORKERS)
