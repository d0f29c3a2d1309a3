"""Other sizes, layouts and types give eager's results."""

from __future__ import annotations

import random

import pytest
import torch

from tests.judge.checks.module_sources import ModuleBench, ModuleCase, make_module
from torch_cudal1.judge.checks import layouts
from torch_cudal1.judge.checks.layouts import (
    DTYPES,
    LAYOUTS,
    SHAPES,
    _draw_larger,
    _expand_strides,
    _list_sizes,
    _make_channels_last_strides,
    _step_two_strides,
    _transpose_strides,
)


def test_sizes_go_around_a_tile_and_none_is_the_examples_own() -> None:
    assert _list_sizes(64, 150, huge=False) == [65, 1, 150, 61, 32, 63, 0]
    assert _list_sizes(65_537, 150_000, huge=True).count(65_537) == 0
    assert _list_sizes(8, 20, huge=True)[-1] == 65_537


def test_a_larger_size_is_no_fixed_multiple() -> None:
    chance = random.Random(3)
    drawn = {_draw_larger(100, chance) for _ in range(50)}
    assert min(drawn) >= 200
    assert max(drawn) <= 300
    assert len(drawn) > 20
    assert {_draw_larger(1, chance) for _ in range(50)} == {2, 3}


@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 6), (2, 3, 4, 5)])
def test_strides_are_those_of_torch(shape: tuple[int, ...]) -> None:
    dense = torch.empty(shape).stride()
    assert _transpose_strides(shape, dense) == torch.empty(shape).mT.contiguous().mT.stride()
    assert _step_two_strides(shape, dense) == tuple(2 * step for step in dense)
    assert _expand_strides(shape, dense) == torch.empty(shape[1:]).expand(shape).stride()
    if len(shape) == 4:
        expected = torch.empty(shape).to(memory_format=torch.channels_last).stride()
        assert _make_channels_last_strides(shape, dense) == expected


def test_one_dimension_has_no_other_order() -> None:
    assert _transpose_strides((7,), (1,)) == (1,)
    assert _make_channels_last_strides((7,), (1,)) == (1,)


MODULES: dict[str, ModuleCase] = {
    "one batch only": (
        {"result": "self.plain(x, y) if len(x) == 8 else 0 * x"},
        "fast",
        (SHAPES,),
        "shapes",
    ),
    "a size that it has kept": (
        {
            "before": "first = self.__dict__.setdefault('first', len(x))",
            "result": "self.plain(x, y) if len(x) == first else 0 * x",
        },
        "fast",
        (SHAPES,),
        "shapes",
    ),
    "room for somewhat more than the examples": (
        {"result": "torch.cat([self.plain(x, y)[:15], 0 * x[15:]])"},
        "fast",
        (SHAPES,),
        "shapes",
    ),
    "the first size after another": (
        {
            "before": "met = self.__dict__.setdefault('met', [])\nmet.append(len(x))",
            "result": "self.plain(x, y) * (1.1 if len(set(met)) > 1 and len(x) == met[0] else 1.0)",
        },
        "fast",
        (SHAPES,),
        "shapes",
    ),
    "rows of a larger batch before": (
        {
            "before": "kept = self.__dict__.get('kept')\n"
            "if kept is None or len(kept) < len(x): kept = self.__dict__['kept'] = torch.zeros(len(x), 16)\n"
            "rest = kept[len(x) :].sum()\nkept[: len(x)] = x.detach()",
            "result": "self.plain(x, y) + rest",
        },
        "fast",
        (SHAPES,),
        "shapes",
    ),
    "scratch memory of the largest batch, of which each call reads what it wrote": (
        {
            "before": "kept = self.__dict__.get('kept')\n"
            "if kept is None or len(kept) < len(x): kept = self.__dict__['kept'] = torch.zeros(len(x), 16)\n"
            "kept[: len(x)] = x.detach()",
            "result": "self.plain(kept[: len(x)], y)",
        },
        "fast",
        (SHAPES,),
        None,
    ),
    "a tail is left out": (
        {
            "before": "r = self.plain(x, y)\nr = torch.cat([r[: len(r) // 8 * 8], 0 * r[len(r) // 8 * 8 :]])",
            "result": "r",
        },
        "fast",
        (SHAPES,),
        "shapes",
    ),
    "it raises for one row": (
        {"before": "if len(x) == 1: raise ValueError('too few rows')"},
        "fast",
        (SHAPES,),
        "shapes",
    ),
    "strides are ignored": (
        {"result": "self.plain(x.as_strided(x.shape, (x.shape[1], 1)), y)"},
        "fast",
        (LAYOUTS,),
        "layouts",
    ),
    "the storage's start is read": (
        {"result": "self.plain(torch.as_strided(x, x.shape, x.stride(), 0), y)"},
        "standard",
        (LAYOUTS,),
        "layouts",
    ),
    "arguments by identity": (
        {"result": "self.plain(x, y) if x is not y else self.plain(x, 0 * y)"},
        "standard",
        (LAYOUTS,),
        "layouts",
    ),
    "a table that stays in float32": (
        {"init": "self.half = torch.full((1,), 1.0)", "result": "self.plain(x, y) * self.half"},
        "standard",
        (DTYPES,),
        "dtypes",
    ),
    "any form at standard": (
        {"before": "x = x.contiguous()"},
        "standard",
        (SHAPES, LAYOUTS, DTYPES),
        None,
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_source_that_is_right_for_one_form_only_is_refused_and_an_honest_source_passes(
    module_bench: ModuleBench, name: str
) -> None:
    module_bench.assert_verdict(MODULES[name])


def test_a_size_for_which_there_is_no_memory_is_left_out_and_told(
    module_bench: ModuleBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of 8 rows of 16 numbers: two inputs and a result, eight times, are 12 KiB.
    monkeypatch.setattr(layouts, "read_free_bytes", lambda device: 4 * 20 << 10)
    (check,) = module_bench.run_checks(make_module(), "strict", (SHAPES,))[-1:]
    assert check.passed
    assert "batch 9, batch 1, " in check.detail
    assert "batch 15 left out, as it may take 0.0 GiB" in check.detail
    monkeypatch.setattr(layouts, "read_free_bytes", lambda device: 0)
    (check,) = module_bench.run_checks(make_module(), "fast", (SHAPES,))[-1:]
    assert "left out" not in check.detail
    # Far larger forms are for small inputs, as what a call makes in between may grow faster.
    monkeypatch.setattr(layouts, "_MOST_GROWN_BYTES", 4 << 10)
    (check,) = module_bench.run_checks(make_module(), "fast", (SHAPES,))[-1:]
    assert "left out, as it may take" in check.detail
    assert "batch 9, batch 1, " in check.detail
    (check,) = module_bench.run_checks(make_module(), "strict", (SHAPES,))[-1:]
    assert "left out" not in check.detail
