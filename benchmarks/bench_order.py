"""In which order kernels are measured, replayed on timings that are on record: how near the best
known time after k measurements.

    python -m benchmarks.bench_order [--out order.json]

Offline, in a minute, without a GPU. Each shape is held out in turn: the cost model learns from the
others, as a search would from its own records, and the kernels of the shape are then "measured" by
looking them up. Two sources, both of real machines:

    products   matrix products of every h200-gemm*.json: right results only; under "fp32" only methods of fp32's accuracy
    programs   the closed program spaces of cpu-landscape.json.gz: those that are right, in spaces with more than four of them

Strategies. `family`: the order without a model (programs have none: the mean of 20 random ones).
`chosen`: what a search compiles with a model, a quarter explored. Of a family whose first eight
proposals are known, four of them `chosen` first: `more` of these, as the model says; and
`population`, children of contrasting parents as well, that are on record (`population-uniform`:
parents drawn without regard to time).
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
from benchmarks.gemm_cases import Case
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.kernels.features import KernelFeatures, extract_features
from torch_cudal1.kernels.ops.matmul import Product
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.kernels.templates.gemm_tiles import METHODS, order_by_bound
from torch_cudal1.kernels.templates.gemm_tiles import read_schedule as schedule_of
from torch_cudal1.search.cost_model.predictor import CostModel, fit_cost_model, pairwise_rank_error
from torch_cudal1.search.cost_model.timings import KernelTiming, make_timing
from torch_cudal1.search.evolution.buckets import draw_contrasting
from torch_cudal1.search.evolution.expected_order import select_proposals
from torch_cudal1.search.evolution.generation import Draw, Legal, propose_generation
from torch_cudal1.training.landscape.landscape_file import read_landscape

__all__ = ["Table", "curves", "main", "products", "programs"]

_RESULTS = Path(__file__).parent / "results"
_LANDSCAPE = (
    Path(__file__).parents[1] / "torch_cudal1" / "training" / "data" / "cpu-landscape.json.gz"
)
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
_FIRST = 4  # kernels of a search's first generation
_KNOWN = (
    8  # of a family's proposals: what `kernels.propose` lists, and whose fields children may have
)
_SHUFFLES = 20


@dataclass(frozen=True)
class Table:
    """The timings on record of one case: microseconds by proposal, in the family's order if it has
    one.

    `shape`: what must not be in the training set when it is asked about.
    """

    name: str
    shape: str
    island: KernelFeatures
    us: Mapping[Proposal, float]
    ordered: bool

    @property
    def best_us(self) -> float:
        """Of all on record."""
        return min(self.us.values())

    def timings(self) -> list[KernelTiming]:
        """As a search would have kept them."""
        return [make_timing(self.island, one, us) for one, us in self.us.items()]

    def recorded(self, proposals: Sequence[Proposal]) -> list[Proposal]:
        """Those that are on record: what else is legal cannot be looked up."""
        return [one for one in proposals if one in self.us]

    def share(self, measured: Sequence[Proposal]) -> float:
        """The best known time over the best of those."""
        return self.best_us / min(self.us[one] for one in measured)


def products(results: Path, *, exact: bool) -> list[Table]:
    """The tables of matrix products; `exact`: methods of fp32's accuracy only."""
    found: dict[Case, dict[Proposal, float]] = defaultdict(dict)
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
            if not (exact and METHODS[row["config"]["method"]].needs_tf32):
                case, proposal = (
                    Case(**document["cases"][row["case"]]),
                    Proposal("gemm", row["config"]),
                )
                found[case][proposal] = min(row["device_us"], found[case].get(proposal, math.inf))
    return [_product(case, us) for case, us in found.items() if len(us) > 2]


def _product(case: Case, us: Mapping[Proposal, float]) -> Table:
    island = extract_features(case.program())
    assert island is not None
    assert isinstance(island.problem, Product)
    order = [
        one.proposal() for one in order_by_bound(island.problem, [schedule_of(one) for one in us])
    ]
    shape = f"{max(1, case.batch)}x{case.m}x{case.n}x{case.k}"
    return Table(
        f"{case.name} {case.tail}".strip(),
        shape,
        island,
        {one: us[one] for one in order},
        ordered=True,
    )


def programs(path: Path) -> list[Table]:
    """The tables of program spaces: times in units of eager's."""
    found = []
    for task, rows in read_landscape(path).rows.items():
        operation, sizes, _ = task.split("/")
        numbers = {f"size_{at}": int(one) for at, one in enumerate(sizes.split("x"))}
        us = {_program(operation, row.program): 1 / row.score for row in rows if row.score}
        if len(us) > _FIRST:
            found.append(
                Table(task, task, KernelFeatures("program", numbers, 1.0), us, ordered=False)
            )
    return found


def _program(operation: str, text: str) -> Proposal:
    words = dict(part.split("=", 1) for part in text.split())
    return Proposal(
        "program",
        {
            "op": operation,
            **{name: int(word) if word.isdigit() else word for name, word in words.items()},
        },
    )


def curves(table: Table, model: CostModel | Refusal) -> dict[str, list[float]]:
    """By strategy: the share of the best known time after each of `_COUNTS` measurements."""
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
            id(order): _bred(table, order[:_KNOWN], model, legal(order), draw) for order in orders
        }
        return mean(lambda order, count: runs[id(order)])

    return {
        "family": mean(lambda order, count: order),
        "chosen": mean(lambda order, count: select_proposals(order, table.island, model, count)),
        "more": bred(lambda order: lambda some: [one for one in some if one in order[:_KNOWN]]),
        "population": bred(lambda order: table.recorded),
        "population-uniform": bred(lambda order: table.recorded, _uniform),
    }


def _uniform(scores: Sequence[float], dice: random.Random) -> list[int]:
    return dice.sample(range(len(scores)), min(2, len(scores)))


def _bred(
    table: Table, known: Sequence[Proposal], model: CostModel | Refusal, legal: Legal, draw: Draw
) -> list[Proposal]:
    """What a search with generations measures, in its order."""
    taken = list(select_proposals(known, table.island, model, _FIRST))
    while len(taken) < max(_COUNTS):
        measured = {one: table.us[one] for one in taken}
        children = propose_generation(
            measured, known, legal, table.island, model, count=_FIRST, seed=len(taken), draw=draw
        )
        if not children:
            break
        taken += children
    return taken


def replayed(kind: str, tables: Sequence[Table]) -> list[dict[str, Any]]:
    """A row a table and strategy, each asked of a model that has seen the other shapes only."""
    rows: list[dict[str, Any]] = []
    for table in tables:
        known = [one for other in tables if other.shape != table.shape for one in other.timings()]
        model = fit_cost_model(known, table.island.family)
        off = None if isinstance(model, Refusal) else _off(table, model)
        for name, shares in curves(table, model).items():
            after = {
                str(count): round(share, 4) for count, share in zip(_COUNTS, shares, strict=True)
            }
            facts = {
                "kind": kind,
                "case": table.name,
                "on_record": len(table.us),
                "records": len(known),
                "off": off,
            }
            facts |= {"why_no_model": model.reason} if isinstance(model, Refusal) else {}
            rows.append({**facts, "strategy": name, "share_after": after})
    return rows


def _off(table: Table, model: CostModel) -> dict[str, float]:
    """How much of all differences between the table's kernels the model, and the bound, have the
    other way round.
    """
    guesses = [one.us for one in model.predict(table.island, list(table.us))]
    bounds = [table.island.lower_bound_us(one) for one in table.us]
    times, model_us, bound_us = (
        torch.tensor(one, dtype=torch.float64).log2()
        for one in (list(table.us.values()), guesses, bounds)
    )
    alone = torch.zeros(len(times), dtype=torch.long)
    return {
        "model": round(pairwise_rank_error(times, model_us, alone), 4),
        "bound": round(pairwise_rank_error(times, bound_us, alone), 4),
    }


def means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Over the cases of a kind, by strategy."""
    found: dict[tuple[Any, Any], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        found[row["kind"], row["strategy"]].append(row)
    made = []
    for (kind, strategy), mine in found.items():
        after = {
            str(k): round(statistics.fmean(row["share_after"][str(k)] for row in mine), 4)
            for k in _COUNTS
        }
        known = [row["off"] for row in mine if row["off"]]
        off = {
            name: round(statistics.fmean(one[name] for one in known), 4)
            for name in ("model", "bound")
            if known
        }
        made.append(
            {
                "kind": kind,
                "strategy": strategy,
                "cases": len(mine),
                "mean_share_after": after,
                "mean_off": off,
            }
        )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, print the means, write the file."""
    parser = argparse.ArgumentParser(prog="benchmarks.bench_order", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("order.json"))
    args = parser.parse_args(argv)
    rows = replayed("products", products(_RESULTS, exact=False)) + replayed(
        "products fp32", products(_RESULTS, exact=True)
    )
    rows += replayed("programs", programs(_LANDSCAPE))
    summary = means(rows)
    for one in summary:
        shares = "  ".join(
            f"{count}: {share:.3f}" for count, share in one["mean_share_after"].items()
        )
        print(f"{one['kind']:15}{one['strategy']:20}{shares}   off: {one['mean_off']}")
    report.save(
        args.out,
        report.document("order", {}, rows, environment=report.environment(), means=summary),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
