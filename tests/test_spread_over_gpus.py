"""xdist's workers are spread over the GPUs of a machine."""

from __future__ import annotations

import pytest

from tests.spread_over_gpus import choose_gpu


@pytest.mark.parametrize(
    ("count", "gpus"), [(1, ["0", "0", "0", "0"]), (2, ["0", "1", "0", "1"]), (4, list("0123"))]
)
def test_every_gpu_has_as_many_workers(count: int, gpus: list[str]) -> None:
    assert [choose_gpu(f"gw{number}", count) for number in range(4)] == gpus
