"""Indices that wrap are refused where there is memory for enough elements; here a small count stands for 2^31."""

from __future__ import annotations

import pytest
import torch

from tests.judge.programs import candidate, linear_relu, subject
from tests.judge.sources import SourceBench, source
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.checks import int64_indexing
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.checks.registry import select_checks
from torch_cudal1.judge.profiles import PROFILES
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child, make_limits

CPU = torch.device("cpu")

MANY = 1 << 16

SOURCES: dict[
    str, tuple[dict[str, str], bool, str]
] = {  # source, does it pass, a word of the detail
    "honest": ({}, True, "shape [1025, 64]"),
    "by blocks of rows": (
        {"result": "torch.cat([torch.relu(self.linear(part)) for part in x.split(100)])"},
        True,
        "shape",
    ),
    "a 16-bit count of elements": (
        {
            "before": "rows = (x.numel() % 65536 or x.numel()) // 64",
            "result": "torch.relu(self.linear(x[:rows]))",
        },
        False,
        "shape",
    ),
    "the second half computed from the first": (
        {
            "before": "out = torch.relu(self.linear(x))\nif x.numel() > 60000:\n    out[512:] = out[:513].clone()",
            "result": "out",
        },
        False,
        "pieces of its outputs are not eager's",
    ),
    "an error": ({"before": "assert x.numel() < 60000"}, False, "eager accepts it"),
    "no memory": (
        {"before": "if x.numel() > 60000:\n    raise MemoryError('too large for me')"},
        True,
        "too large for me",
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_is_called_with_many_elements(
    bench: SourceBench, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int64_indexing, "ELEMENTS", MANY)
    parts, passes, word = SOURCES[name]
    check = bench.last(source(**parts), NUMERICS, int64_indexing.INT64_INDEXING)
    assert check.passed == passes, check
    assert check.name == "shapes"
    assert word in check.detail


def test_sizes_that_do_not_fit_into_memory_are_not_tried(
    bench: SourceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int64_indexing, "read_free_bytes", lambda device: 1 << 20)
    check = bench.last(source(), NUMERICS, int64_indexing.INT64_INDEXING)
    assert check.passed
    assert "not applicable" in check.detail
    assert "GiB are free" in check.detail


def test_programs_are_left_out_and_only_strict_tries_sources() -> None:
    region = linear_relu()
    with Child(make_limits(Settings(), CPU), Contract()) as child:
        (check,) = int64_indexing.check_int64_indexing(
            Trial(subject(region), candidate(region.program), Contract(), CPU, child)
        )
    assert "not applicable" in check.detail
    by_profile = {
        name: int64_indexing.INT64_INDEXING in select_checks(profile)
        for name, profile in PROFILES.items()
    }
    assert by_profile == {"fast": False, "standard": False, "strict": True}
