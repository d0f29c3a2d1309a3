"""Arms leave out what they say, and "gains multiply" is a number."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.kernelbench.ablation import (
    ARMS,
    compute_products,
    make_settings,
    summarise_products,
)
from torch_cudal1.core.settings import FAMILIES, Settings


def row(key: str, together: float, **alone: float) -> dict[str, Any]:
    speeds = {"cudal1": together} | {f"only {family}": gain for family, gain in alone.items()}
    columns = {name: {"status": "ok"} for name in ("eager", *speeds)}
    against = {
        name: {
            "eager": {"speedup": s, "low": s, "high": s},
            "best": {"speedup": s, "low": s, "high": s},
        }
        for name, s in speeds.items()
    }
    return {"task": {"key": key, "level": 1}, "columns": columns, "against": against}


def test_an_arm_keeps_one_family_or_leaves_one_out() -> None:
    assert len(ARMS) == 2 * len(FAMILIES)
    for family in FAMILIES:
        assert set(make_settings(f"only {family}", Settings()).without) == set(FAMILIES) - {family}
        assert make_settings(f"without {family}", Settings()).without == (family,)
    assert make_settings("cudal1", Settings()).without == ()


def test_gains_that_multiply_have_a_share_of_one_and_those_that_overlap_less() -> None:
    full = row("1/1", 6.0, rewrites=2.0, kernels=3.0, compile=1.0, graphs=1.0)
    overlap = row("1/2", 2.0, rewrites=2.0, kernels=2.0, compile=1.0, graphs=0.5)
    task_products = compute_products([full, overlap, row("1/3", 9.0, rewrites=3.0)])
    assert [(product.key, product.product, product.share) for product in task_products] == [
        ("1/1", 6.0, 1.0),
        ("1/2", 4.0, 0.5),
    ]
    means = summarise_products(task_products)
    assert means["only rewrites"] == pytest.approx(2.0)
    assert means["product"] == pytest.approx(24**0.5)
    assert means["together over product"] == pytest.approx(0.5**0.5)
