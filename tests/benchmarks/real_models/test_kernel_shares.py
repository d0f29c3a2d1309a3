"""Which kernels a call's microseconds go to."""

from __future__ import annotations

import pytest
import torch

from benchmarks.real_models.kernel_shares import list_kernel_shares


def test_a_cpu_has_no_kernels() -> None:
    calls: list[int] = []
    shares = list_kernel_shares(lambda: calls.append(1), torch.device("cpu"))
    assert shares == {"busy_us": 0, "kernels": [], "other_us": 0}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_kernels_of_a_graph_are_listed_by_name_and_call() -> None:
    device = torch.device("cuda", 0)
    x, graph = torch.randn(512, 512, device=device), torch.cuda.CUDAGraph()
    torch.relu(x @ x)
    with torch.cuda.graph(graph):
        torch.relu(x @ x)
    shares = list_kernel_shares(graph.replay, device)
    assert sum(count for _, count, _ in shares["kernels"]) == 2
    assert shares["busy_us"] == pytest.approx(
        sum(us for _, _, us in shares["kernels"]) + shares["other_us"], abs=0.1
    )
