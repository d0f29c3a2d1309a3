"""Which of PyTorch's own ways the quick tier tries, and that a search goes on from what it left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.ir.stacks import ROWS, WIDTH, capture_region, make_stack
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.records import Candidate, Region
from torch_cudal1.ir.schedule import INDUCTOR
from torch_cudal1.search import quick
from torch_cudal1.search.quick import explain_no_schedule, list_quick_schedules, make_quick_entry
from torch_cudal1.search.tune import choose
from torch_cudal1.store.context import TuneContext, make_context

X = torch.randn(2, 4)


def capture(module: nn.Module, *, trains: bool = False) -> tuple[Region, ...]:
    with torch.set_grad_enabled(trains):
        return capture_regions(module, (X,))


NET = capture(nn.Linear(4, 4).eval())
STACK = (capture_region(make_stack(6), torch.randn(ROWS, WIDTH)),)
SHORT_STACK = (capture_region(make_stack(3), torch.randn(ROWS, WIDTH)),)
RANDOM = capture(nn.Dropout())
STEP = capture(nn.Linear(4, 4), trains=True)


def make_place(folder: Path, device: str = "cpu", **options: object) -> TuneContext:
    settings = Settings(cache_dir=folder, **options)
    place = make_context(torch.device("cpu"), settings)
    return replace(place, device=torch.device(device))


@pytest.mark.parametrize(
    ("regions", "device", "without", "schedules"),
    [
        (NET, "cpu", (), ["inductor"]),
        (NET, "cuda", (), ["inductor", "inductor+graph", "eager+graph"]),
        (NET, "cuda", ("graphs",), ["inductor"]),
        (NET, "cuda", ("compile",), ["eager+graph"]),
        (NET, "cpu", ("compile",), []),
        # Off a GPU only eager draws eager's random numbers.
        (RANDOM, "cpu", (), []),
        (RANDOM, "cuda", (), ["inductor", "inductor+graph", "eager+graph"]),
        # Layers are compiled once where a CUDA graph hides that they are called one by one.
        (STACK, "cuda", (), ["regional", "regional+graph", "eager+graph"]),
        (STACK, "cuda", ("graphs",), ["inductor"]),
        (STACK, "cpu", (), ["inductor"]),
        # Cutting one of three layers in two leaves two, which is most of them.
        (SHORT_STACK, "cuda", (), ["inductor", "inductor+graph", "eager+graph"]),
        # Autograd holds what the graphs of a step return.
        (STEP, "cuda", (), ["inductor"]),
    ],
)
def test_what_is_right_by_construction_is_tried(
    regions: tuple[Region, ...],
    device: str,
    without: tuple[str, ...],
    schedules: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quick, "MIN_COPIED_STEPS", 10)
    place = make_place(tmp_path, device, without=without)
    assert list_quick_schedules(regions, place) == schedules


@pytest.mark.parametrize(
    ("regions", "without", "words"),
    [(NET, ("compile",), "`without`"), (RANDOM, (), "random numbers")],
)
def test_where_nothing_is_tried_there_is_a_reason(
    regions: tuple[Region, ...], without: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    assert words in explain_no_schedule(regions, make_place(tmp_path, without=without))


def test_a_small_stack_is_compiled_as_a_whole(tmp_path: Path) -> None:
    schedules = list_quick_schedules(STACK, make_place(tmp_path, "cuda"))
    assert schedules == ["inductor", "inductor+graph", "eager+graph"]


def test_a_call_that_writes_to_its_inputs_is_compiled_as_dynamo_traced_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "MIN_COPIED_STEPS", 10)
    schedules = list_quick_schedules(STACK, make_place(tmp_path, "cuda"), writes=True)
    assert schedules == ["inductor", "inductor+graph", "eager+graph"]


def own(region: Region) -> Candidate:
    return Candidate(region.program, INDUCTOR, "baseline")


def test_its_entry_serves_every_later_process_and_is_a_miss_to_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, (region,) = make_place(tmp_path), NET
    entry = make_quick_entry(region, place, own(region), {"eager": 2.0, "inductor": 1.0}, {})
    assert entry.is_quick
    place.cache.put(entry)
    for on_miss in ("quick", "baseline", "error"):
        known = make_place(tmp_path, on_miss=on_miss)
        assert choose(region, known).candidate.schedule == "inductor"
    searched: list[str] = []

    def tune(region: Region, place: TuneContext, **_: object) -> object:
        searched.append(region.key)
        return make_quick_entry(region, place, own(region), {}, {})

    monkeypatch.setattr("torch_cudal1.search.tune.tune", tune)
    choose(region, make_place(tmp_path, on_miss="tune"))
    assert searched == [region.key]


def test_where_nothing_is_known_the_caller_decides(tmp_path: Path) -> None:
    choice = choose(NET[0], make_place(tmp_path, on_miss="quick"))
    assert choice.entry is None
    assert choice.reason == "no cached decision"
