"""What a workload costs on a GPU type comes from decisions made there, and what is not known is
said, not guessed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api.gpu_decisions import H200, L4, make_decision, make_region
from torch_cudal1.api.gpu_comparison import (
    GpuPrices,
    HardwareRow,
    Load,
    Price,
    compare,
    move_program,
    read_prices,
)
from torch_cudal1.core.errors import SettingError
from torch_cudal1.ir.program import Alloc, Aten, Call, Program, TensorSpec
from torch_cudal1.ir.records import Target


def by_name(rows: tuple[HardwareRow, ...]) -> dict[str, HardwareRow]:
    return {row.hardware: row for row in rows}


def test_time_gain_and_price_are_those_of_the_evidence() -> None:
    small, large = make_region(4), make_region(8)
    loads = [Load("a", (small,), 3.0), Load("b", (small, large), 1.0)]
    entries = [
        make_decision(small, H200, 10.0, baseline_us=20.0),
        make_decision(large, H200, 30.0),
        make_decision(small, L4, 40.0),
        make_decision(large, L4, 80.0),
    ]
    prices = GpuPrices({H200: Price(3.6, 720.0), L4: Price(0.72)}, "EUR")
    comparison = compare(loads, entries, prices)
    assert comparison.workload == ("a: 75% of the calls", "b: 25% of the calls")
    assert [row.hardware for row in comparison.rows] == [L4, H200], "the cheapest first"
    h200, l4 = by_name(comparison.rows)[H200], by_name(comparison.rows)[L4]
    assert h200.us_per_call == pytest.approx(10 + 30 / 4)
    assert h200.gain == pytest.approx((20 + 30 / 4) / 17.5)
    assert h200.cost_per_million == pytest.approx(17.5 / 3600 * 3.6)  # a million calls take 17.5 s
    assert h200.kwh_per_million == pytest.approx(17.5 / 3600 * 0.72)
    assert (h200.share_decided, h200.missing) == (1.0, ())
    assert l4.us_per_call == pytest.approx(60.0)
    assert l4.gain == pytest.approx(1.0)
    assert l4.kwh_per_million is None


def test_without_prices_the_fastest_comes_first_and_says_what_it_lacks() -> None:
    rows = compare(
        [Load("a", (make_region(4),))],
        [make_decision(make_region(4), L4, 9.0), make_decision(make_region(4), H200, 3.0)],
    ).rows
    assert [row.hardware for row in rows] == [H200, L4]
    assert rows[0].cost_per_million is None
    assert rows[0].missing == ("no price was given (--prices)",)


def test_a_region_without_a_decision_leaves_no_time_and_is_named() -> None:
    loads = [Load("a", (make_region(4),)), Load("b", (make_region(512),))]
    entries = [
        make_decision(make_region(4), L4, 9.0),
        make_decision(make_region(4), H200, 3.0),
        make_decision(make_region(512), H200, 4.0),
    ]
    rows = by_name(compare(loads, entries, GpuPrices({L4: Price(0.5), H200: Price(3.0)})).rows)
    assert rows[H200].us_per_call == pytest.approx(3.5)
    assert (rows[L4].us_per_call, rows[L4].cost_per_million, rows[L4].gain) == (None, None, None)
    assert 0 < rows[L4].share_decided < 0.5, (
        "weighted by work: the missing region is the larger one"
    )
    assert rows[L4].missing == ("b, r512: no decision; run `cudal1 warmup` there",)


@pytest.mark.parametrize(
    "evidence",
    [
        {},
        {"timing": None, "baselines_us": None},
        {"baselines_us": {"eager": "fast"}},
        {"baselines_us": {"eager": math.nan}},
    ],
)
def test_a_decision_that_was_never_timed_is_no_time(evidence: dict[str, Any]) -> None:
    (row,) = compare(
        [Load("a", (make_region(4),))], [make_decision(make_region(4), L4, None, evidence=evidence)]
    ).rows
    assert (row.us_per_call, row.share_decided) == (None, 0.0)
    assert "never timed alone" in row.missing[0]


def test_the_newest_decision_counts_whatever_the_order() -> None:
    entries = [
        make_decision(make_region(4), L4, 9.0),
        make_decision(make_region(4), L4, 7.0, created="2026-02-01T00:00:00+00:00"),
    ]
    for ordered in (entries, entries[::-1]):
        assert compare([Load("a", (make_region(4),))], ordered).rows[0].us_per_call == 7.0


def test_drivers_and_versions_of_one_gpu_type_are_one_row_and_a_cpu_is_none() -> None:
    newer = Target("cuda", "sm_89", L4, "580", "2.14.0", "3.8")
    cpu = Target("cpu", "x86_64", "Some CPU", "", "2.13.0", "3.7")
    entries = [
        make_decision(make_region(4), L4, 9.0),
        make_decision(make_region(8), L4, 9.0, target=newer),
        make_decision(make_region(4), "x", 1.0, target=cpu),
    ]
    assert [
        row.hardware for row in compare([Load("a", (make_region(4), make_region(8)))], entries).rows
    ] == [L4]


def test_a_price_without_evidence_is_a_row_that_says_so() -> None:
    (row,) = compare(
        [Load("a", (make_region(4),))], [], GpuPrices({"NVIDIA B200": Price(6.0)})
    ).rows
    assert (row.hardware, row.us_per_call, row.share_decided) == ("NVIDIA B200", None, 0.0)
    assert "no decision that was made on a GPU of this name" in row.missing[0]


def test_a_program_moves_to_another_device_in_all_its_parts() -> None:
    spec = TensorSpec("float32", (4,), (1,), "cpu")
    full = Aten("aten.full.default", ((4,), 1.0), (("device", torch.device("cpu")),), (1,))
    inner = Program((spec,), (full,), (1,))
    program = Program((spec,), (Alloc(1, spec), Call(inner, (0,), (2,))), (2,))
    there = move_program(program, "cuda")
    assert "cpu" not in json.dumps(there.to_json())
    assert move_program(there, "cpu") == program


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "found"),
        ("[]", "found"),
        ('{"NVIDIA L4": 3}', "price_per_hour and watts"),
        ('{"NVIDIA L4": {}}', "price_per_hour and watts"),
        ('{"NVIDIA L4": {"price": 3}}', "price_per_hour and watts"),
        ('{"NVIDIA L4": {"watts": -1}}', "watts -1"),
        ('{"NVIDIA L4": {"watts": true}}', "watts True"),
        ('{"NVIDIA L4": {"watts": NaN}}', "watts nan"),
        ('{"NVIDIA L4": {"price_per_hour": "3"}}', "price_per_hour '3'"),
        ('{"currency": 3}', "currency"),
        ("[" * 100_000, "found"),
    ],
)
def test_prices_that_are_none_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "prices.json"
    path.write_text(text)
    with pytest.raises(SettingError, match=reason) as caught:
        read_prices(path)
    assert "prices.json" in str(caught.value)


def test_prices_are_read_and_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text(
        json.dumps(
            {"currency": "EUR", L4: {"price_per_hour": 1, "watts": 72.5}, H200: {"watts": 700}}
        )
    )
    assert read_prices(path) == GpuPrices({L4: Price(1, 72.5), H200: Price(None, 700)}, "EUR")
    with pytest.raises(SettingError, match="No such file"):
        read_prices(tmp_path / "none.json")


# The command
# -------------------------------------------------------------------------------------------------------------------
