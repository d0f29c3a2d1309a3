"""The replay of orders: on committed timings the model orders unseen shapes better than the bound;
the published file is whole.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

from benchmarks import bench_order
from benchmarks.bench_order import compute_curves, compute_means, load_product_tables, replay
from torch_cudal1.core.refusal import Refusal

RESULTS = Path(bench_order.__file__).parent / "results"
COMMITTED = json.loads((RESULTS / "schedule-order.json").read_text())


def test_on_committed_products_the_model_orders_shapes_it_has_not_seen_better_than_the_bound() -> (
    None
):
    rows = [
        row
        for row in replay("products fp32", load_product_tables(RESULTS, exact=True))
        if row["off"]
    ]
    assert len({row["case"] for row in rows}) >= 4
    model, bound = (
        statistics.fmean(row["off"][name] for row in rows) for name in ("model", "bound")
    )
    assert model < 0.8 * bound
    assert all(row["share_after"]["4"] > 0.98 for row in rows)


def test_a_group_of_products_is_no_single_product(tmp_path: Path) -> None:
    document = json.loads((RESULTS / "h200-gemm-layers.json").read_text())
    (tmp_path / "h200-gemm.json").write_text(json.dumps(document))
    assert load_product_tables(tmp_path, exact=False)
    for case in document["cases"].values():
        case["siblings"] = 3
    (tmp_path / "h200-gemm.json").write_text(json.dumps(document))
    assert load_product_tables(tmp_path, exact=False) == []


def test_without_a_model_what_is_chosen_is_the_familys_order() -> None:
    for table in load_product_tables(RESULTS, exact=False)[:2]:
        curves = compute_curves(table, Refusal("nothing"))
        assert curves["chosen"] == curves["family"]
        assert not math.isnan(curves["family"][0])


def test_shares_grow_and_end_with_the_best() -> None:
    for row in COMMITTED["rows"]:
        shares = list(row["share_after"].values())
        assert shares == sorted(shares)
        assert 0.0 < shares[0] <= shares[-1] <= 1.0
        if row["strategy"] == "family" and row["on_record"] <= 16:
            assert shares[-1] == 1.0


def test_the_committed_means_are_those_of_the_committed_rows() -> None:
    assert compute_means(COMMITTED["rows"]) == COMMITTED["means"]


def test_on_committed_programs_the_model_finds_in_four_what_random_orders_do_not() -> None:
    after = {
        mean["strategy"]: mean["mean_share_after"]["4"]
        for mean in COMMITTED["means"]
        if mean["kind"] == "programs"
    }
    assert after["chosen"] > after["family"] + 0.1
