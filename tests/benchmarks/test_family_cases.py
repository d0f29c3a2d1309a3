"""Every case of a kernel family has a kernel on an H200; the chunked scan computes the recurrence."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.bench_families import explain_missing_kernel
from benchmarks.family_cases import CASES, FamilyCase, make_chunked_scan
from benchmarks.kernelbench.planning import _on_cuda
from torch_cudal1.graph.capture import trace
from torch_cudal1.graph.functional_module import FunctionalModule
from torch_cudal1.graph.fusion.partition import partition
from torch_cudal1.graph.lower import lower
from torch_cudal1.ir.records import Region
from torch_cudal1.kernels import propose


def capture_for_cuda(case: FamilyCase) -> Region:
    """The case's region without memory, as if its tensors were on a GPU."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        flat = FunctionalModule(case.module(), case.inputs(), {})
        (graph,) = trace(flat, flat.tensors).graphs
        region = lower(graph.module, static=graph.static, kind=graph.kind, name=case.name).region
    return replace(region, program=_on_cuda(region.program))


def test_every_case_has_a_proposal_on_an_h200_or_a_reason() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    reasons = {}
    # what the CPU captures a fused attention as is the CPU's own, which no kernel is for
    for case in (case for case in CASES if not case.name.startswith("fused")):
        parts = partition(capture_for_cuda(case), products=case.products)
        if not any(propose(island.region.program, 90, most=1) for island in parts.groups):
            reasons[case.name] = explain_missing_kernel(parts)
    assert reasons == {"average pool 2-D": "a window of (11, 11) over torch.float32"}


def test_a_scan_in_chunks_is_the_recurrence() -> None:
    torch.manual_seed(0)
    batch, positions, heads, size, states = 2, 12, 3, 5, 4
    wide = (batch, positions, heads)
    x, b, c = (torch.randn(*wide, width, dtype=torch.float64) for width in (size, states, states))
    a = -torch.rand(wide, dtype=torch.float64)
    state, expected = torch.zeros(batch, heads, states, size, dtype=torch.float64), []
    for t in range(positions):
        state = a[:, t].exp()[..., None, None] * state + b[:, t, :, :, None] * x[:, t, :, None, :]
        expected.append(torch.einsum("bhn,bhnp->bhp", c[:, t], state))
    torch.testing.assert_close(make_chunked_scan(4)(x, a, b, c), torch.stack(expected, 1))
