"""In which order a search measures kernels, replayed on recorded timings: how near the best known
time it is after k measurements.

    python -m benchmarks.bench_order [--out order.json]

The replay needs no GPU and takes a minute. Each shape is held out in turn: the cost model learns
from the others, as a search would from its own records, and the kernels of the shape are then
"measured" by looking them up. Two sources, both of real machines:

    products   matrix products of every h200-gemm*.json: right results only; under "fp32" only methods of fp32's accuracy
    programs   the closed program spaces of cpu-landscape.json.gz: those that are right, in spaces with more than four of them

Strategies. `family`: the order without a model (for programs, which have none, the mean of 20
random orders). `chosen`: what a search with a model compiles, a quarter of it exploration. The next
three start with the first eight proposals of the family, four of them as in `chosen`. `more`:
further ones of the eight, in the model's order. `population`: mutants of parents with contrasting
times too, as far as they are on record. `population-uniform`: the same with parents drawn without
regard to time.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.gemm_cases import GemmCase
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.kernels.features import KernelFeatures, extract_features
from torch_cudal1.kernels.ops.matmul import Product
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.kernels.templates.gemm_tiles import METHODS, order_by_bound
from torch_cudal1.kernels.templates.gemm_tiles import read_schedule as schedule_of
from torch_cudal1.search.cost_model.predictor import CostModel, fit_cost_model, measure_rank_error
from torch_cudal1.search.cost_model.timings import KernelTiming, make_timing
from torch_cudal1.search.evolution.buckets import draw_contrasting
from torch_cudal1.search.evolution.expected_order import select_proposals
from torch_cudal1.search.evolution.generation import Draw, Legal, propose_generation
from torch_cudal1.training.landscape.landscape_file import read_landscape

__all__ = ["TimingTable", "compute_curves", "load_product_tables", "load_program_tables", "main"]

_RESULTS = Path(__file__).parent / "results"
_LANDSCAPE = (
    Path(__file__).parents[1] / "torch_cudal1" / "training" / "data" / "cpu-landscape.json.gz"
)
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
_GENERATION_SIZE = 4  # kernels of a search's first generation
_FIRST_PROPOSALS = (
    8  # of a family's proposals: what `kernels.propose` lists, and whose fields children may have
)
_SHUFFLES = 20


@dataclass(frozen=True)
class TimingTable:
    """The timings on record of one case: microseconds by proposal, in the family's order if it has
    one.

    `shape`: what must not be in the training set of the model that orders it.
    """

    name: str
    shape: str
    features: KernelFeatures
    us: Mapping[Proposal, float]
    ordered: bool

    @property
    def best_us(self) -> float:
        """The smallest time on record."""
        return min(self.us.values())

    def timings(self) -> list[KernelTiming]:
        """The records that a search would have stored."""
        return [make_timing(self.features, proposal, us) for proposal, us in self.us.items()]

    def keep_recorded(self, proposals: Sequence[Proposal]) -> list[Proposal]:
        """The proposals that are on record: another legal one has no time to look up."""
        return [proposal for proposal in proposals if proposal in self.us]

    def share(self, measured: Sequence[Proposal]) -> float:
        """The best known time over the best of these proposals."""
        return self.best_us / min(self.us[proposal] for proposal in measured)


def load_product_tables(results: Path, *, exact: bool) -> list[TimingTable]:
    """The tables of matrix products; `exact`: only those of fp32, by methods of its accuracy."""
    times_by_case: dict[GemmCase, dict[Proposal, float]] = defaultdict(dict)
    for path in sorted(results.glob("h200-gemm*.json")):
        document = report.load(path)
        for row in document["rows"]:
            if (
                "config" not in row
                or "device_us" not in row
                or row.get("wrong")
                or not row.get("special", True)
            ):
                continue
            case = GemmCase(**document["cases"][row["case"]])
            # A group of products has schedules of its own template.
            if case.siblings > 1:
                continue
            is_loose = case.dtype != "float32" or METHODS[row["config"]["method"]].needs_tf32
            if not (exact and is_loose):
                proposal = Proposal("gemm", row["config"])
                times_by_case[case][proposal] = min(
                    row["device_us"], times_by_case[case].get(proposal, math.inf)
                )
    return [_make_product_table(case, us) for case, us in times_by_case.items() if len(us) > 2]


def _make_product_table(case: GemmCase, us: Mapping[Proposal, float]) -> TimingTable:
    features = extract_features(case.program())
    assert features is not None
    assert isinstance(features.problem, Product)
    order = [
        proposal.proposal()
        for proposal in order_by_bound(features.problem, [schedule_of(proposal) for proposal in us])
    ]
    shape = f"{max(1, case.batch)}x{case.m}x{case.n}x{case.k}"
    return TimingTable(
        f"{case.name} {case.tail}".strip(),
        shape,
        features,
        {proposal: us[proposal] for proposal in order},
        ordered=True,
    )


def load_program_tables(path: Path) -> list[TimingTable]:
    """The tables of program spaces: times in units of eager's."""
    tables = []
    for task, rows in read_landscape(path).rows.items():
        operation, sizes, _ = task.split("/")
        numbers = {f"size_{at}": int(size) for at, size in enumerate(sizes.split("x"))}
        us = {_parse_program(operation, row.program): 1 / row.score for row in rows if row.score}
        if len(us) > _GENERATION_SIZE:
            tables.append(
                TimingTable(task, task, KernelFeatures("program", numbers, 1.0), us, ordered=False)
            )
    return tables


def _parse_program(operation: str, text: str) -> Proposal:
    words = dict(part.split("=", 1) for part in text.split())
    return Proposal(
        "program",
        {
            "op": operation,
            **{name: int(word) if word.isdigit() else word for name, word in words.items()},
        },
    )


def compute_curves(table: TimingTable, model: CostModel | Refusal) -> dict[str, list[float]]:
    """For each strategy the share of the best known time after each of `_COUNTS` measurements."""
    family = list(table.us)
    orders = (
        [family]
        if table.ordered
        else [random.Random(seed).sample(family, len(family)) for seed in range(_SHUFFLES)]
    )

    def mean(measured: Callable[[list[Proposal], int], Sequence[Proposal]]) -> list[float]:
        return [
            statistics.fmean(table.share(measured(order, count)[:count]) for order in orders)
            for count in _COUNTS
        ]

    def bred(
        legal: Callable[[list[Proposal]], Legal], draw: Draw = draw_contrasting
    ) -> list[float]:
        runs = {
            id(order): _run_generations(table, order[:_FIRST_PROPOSALS], model, legal(order), draw)
            for order in orders
        }
        return mean(lambda order, count: runs[id(order)])

    return {
        "family": mean(lambda order, count: order),
        "chosen": mean(lambda order, count: select_proposals(order, table.features, model, count)),
        "more": bred(
            lambda order: (
                lambda some: [proposal for proposal in some if proposal in order[:_FIRST_PROPOSALS]]
            )
        ),
        "population": bred(lambda order: table.keep_recorded),
        "population-uniform": bred(lambda order: table.keep_recorded, _draw_uniformly),
    }


def _draw_uniformly(scores: Sequence[float], dice: random.Random) -> list[int]:
    return dice.sample(range(len(scores)), min(2, len(scores)))


def _run_generations(
    table: TimingTable,
    proposals: Sequence[Proposal],
    model: CostModel | Refusal,
    legal: Legal,
    draw: Draw,
) -> list[Proposal]:
    """The proposals that a search with generations measures, in its order."""
    chosen = list(select_proposals(proposals, table.features, model, _GENERATION_SIZE))
    while len(chosen) < max(_COUNTS):
        measured = {proposal: table.us[proposal] for proposal in chosen}
        children = propose_generation(
            measured,
            proposals,
            legal,
            table.features,
            model,
            count=_GENERATION_SIZE,
            seed=len(chosen),
            draw=draw,
        )
        if not children:
            break
        chosen += children
    return chosen


def replay(kind: str, tables: Sequence[TimingTable]) -> list[dict[str, Any]]:
    """A row a table and strategy, each with a model that has seen the other shapes only."""
    rows: list[dict[str, Any]] = []
    for table in tables:
        other_timings = [
            timing for other in tables if other.shape != table.shape for timing in other.timings()
        ]
        model = fit_cost_model(other_timings, table.features.family)
        off = None if isinstance(model, Refusal) else _compute_rank_errors(table, model)
        for name, shares in compute_curves(table, model).items():
            after = {
                str(count): round(share, 4) for count, share in zip(_COUNTS, shares, strict=True)
            }
            facts = {
                "kind": kind,
                "case": table.name,
                "on_record": len(table.us),
                "records": len(other_timings),
                "off": off,
            }
            facts |= {"why_no_model": model.reason} if isinstance(model, Refusal) else {}
            rows.append({**facts, "strategy": name, "share_after": after})
    return rows


def _compute_rank_errors(table: TimingTable, model: CostModel) -> dict[str, float]:
    """The share of all pairwise differences between the table's kernels that the cost model, and
    the lower bound, order the wrong way round.
    """
    guesses = [prediction.us for prediction in model.predict(table.features, list(table.us))]
    bounds = [table.features.lower_bound_us(proposal) for proposal in table.us]
    times, model_us, bound_us = (
        torch.tensor(values, dtype=torch.float64).log2()
        for values in (list(table.us.values()), guesses, bounds)
    )
    alone = torch.zeros(len(times), dtype=torch.long)
    return {
        "model": round(measure_rank_error(times, model_us, alone), 4),
        "bound": round(measure_rank_error(times, bound_us, alone), 4),
    }


def compute_means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means over the cases of a kind, for each strategy."""
    rows_by_strategy: dict[tuple[Any, Any], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        rows_by_strategy[row["kind"], row["strategy"]].append(row)
    summary = []
    for (kind, strategy), strategy_rows in rows_by_strategy.items():
        after = {
            str(k): round(statistics.fmean(row["share_after"][str(k)] for row in strategy_rows), 4)
            for k in _COUNTS
        }
        errors = [row["off"] for row in strategy_rows if row["off"]]
        off = {
            name: round(statistics.fmean(error[name] for error in errors), 4)
            for name in ("model", "bound")
            if errors
        }
        summary.append(
            {
                "kind": kind,
                "strategy": strategy,
                "cases": len(strategy_rows),
                "mean_share_after": after,
                "mean_off": off,
            }
        )
    return summary


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, print the means, write the file."""
    parser = argparse.ArgumentParser(prog="benchmarks.bench_order", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("order.json"))
    args = parser.parse_args(argv)
    rows = replay("products", load_product_tables(_RESULTS, exact=False)) + replay(
        "products fp32", load_product_tables(_RESULTS, exact=True)
    )
    rows += replay("programs", load_program_tables(_LANDSCAPE))
    summary = compute_means(rows)
    for mean_row in summary:
        shares = "  ".join(
            f"{count}: {share:.3f}" for count, share in mean_row["mean_share_after"].items()
        )
        print(
            f"{mean_row['kind']:15}{mean_row['strategy']:20}{shares}   off: {mean_row['mean_off']}"
        )
    report.save(
        args.out,
        report.make_document("order", {}, rows, environment=report.environment(), means=summary),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
