"""In which order kernels are measured, replayed on timings that are on record: how near the best known time after k measurements.

    python -m benchmarks.bench_order [--out order.json]

Offline, in seconds, without a GPU. Each shape is held out in turn: the cost model learns from the others, as a search would from its
own records, and the kernels of the shape are then "measured" by looking them up. Two sources, both measured whole on real machines:

    products   matrix products of every h200-gemm*.json: right results only; under "fp32" only methods of fp32's accuracy
    programs   the closed program spaces of cpu-landscape.json.gz; a program that fails is a measurement that yields nothing

`family`: the order of today (of programs there is none: the mean of 20 random ones). `chosen`: what a search compiles, with the model
and a quarter explored. `population`: four of these, then children of contrasting parents, four at a time, that are on record.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.gemm_cases import Case
from torch_cudal1.kernels.gemm_schedules import METHODS, in_order
from torch_cudal1.kernels.gemm_schedules import read as schedule_of
from torch_cudal1.kernels.plan import Proposal
from torch_cudal1.kernels.products import Product
from torch_cudal1.kernels.traits import Island, island_of
from torch_cudal1.learned.generation import next_generation
from torch_cudal1.learned.model import CostModel, Unknown, learn
from torch_cudal1.learned.order import chosen
from torch_cudal1.learned.timings import Timing, timing_of
from torch_cudal1.training.landscape.packed import read

__all__ = ["Table", "curves", "main", "products", "programs"]

_RESULTS = Path(__file__).parent / "results"
_LANDSCAPE = Path(__file__).parents[1] / "torch_cudal1" / "training" / "data" / "cpu-landscape.json.gz"
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
_FIRST = 4  # kernels of a search's first generation
_KNOWN = 24  # of the family's proposals, whose fields children may have
_SHUFFLES = 20


@dataclass(frozen=True)
class Table:
    """The timings on record of one case: microseconds (NaN: it failed) by proposal, in the family's order if it has one.

    `shape`: what must not be in the training set when it is asked about.
    """

    name: str
    shape: str
    island: Island
    us: Mapping[Proposal, float]
    ordered: bool

    @property
    def best_us(self) -> float:
        """Of all on record."""
        return min(us for us in self.us.values() if not math.isnan(us))

    def timings(self) -> list[Timing]:
        """As a search would have kept them."""
        return [timing_of(self.island, one, us) for one, us in self.us.items() if not math.isnan(us)]

    def recorded(self, proposals: Sequence[Proposal]) -> list[Proposal]:
        """Those that are on record: what else is legal cannot be looked up."""
        return [one for one in proposals if one in self.us]

    def share(self, measured: Sequence[Proposal]) -> float:
        """The best known time over the best of those; 0 where none of them ran."""
        found = [us for one in measured if not math.isnan(us := self.us[one])]
        return self.best_us / min(found) if found else 0.0


def products(results: Path, *, exact: bool) -> list[Table]:
    """The tables of matrix products; `exact`: methods of fp32's accuracy only."""
    found: dict[Case, dict[Proposal, float]] = defaultdict(dict)
    for path in sorted(results.glob("h200-gemm*.json")):
        document = report.load(path)
        for row in document["rows"]:
            if "config" not in row or "device_us" not in row or row.get("wrong") or not row.get("special", True):
                continue
            if not (exact and METHODS[row["config"]["method"]].tf32_right):
                case, proposal = Case(**document["cases"][row["case"]]), Proposal("gemm", row["config"])
                found[case][proposal] = min(row["device_us"], found[case].get(proposal, math.inf))
    return [_product(case, us) for case, us in found.items() if len(us) > 2]


def _product(case: Case, us: Mapping[Proposal, float]) -> Table:
    island = island_of(case.program())
    assert island is not None
    assert isinstance(island.subject, Product)
    order = [one.proposal() for one in in_order(island.subject, [schedule_of(one) for one in us])]
    shape = f"{max(1, case.batch)}x{case.m}x{case.n}x{case.k}"
    return Table(f"{case.name} {case.tail}".strip(), shape, island, {one: us[one] for one in order}, ordered=True)


def programs(path: Path) -> list[Table]:
    """The tables of program spaces: times in units of eager's."""
    found = []
    for task, rows in read(path).rows.items():
        operation, sizes, _ = task.split("/")
        numbers = {f"size_{at}": int(one) for at, one in enumerate(sizes.split("x"))}
        us = {_program(operation, row.program): 1 / row.score if row.score else math.nan for row in rows}
        found.append(Table(task, task, Island("program", numbers, 1.0), us, ordered=False))
    return found


def _program(operation: str, text: str) -> Proposal:
    words = dict(part.split("=", 1) for part in text.split())
    return Proposal("program", {"op": operation, **{name: int(word) if word.isdigit() else word for name, word in words.items()}})


def curves(table: Table, model: CostModel | Unknown) -> dict[str, list[float]]:
    """By strategy: the share of the best known time after each of `_COUNTS` measurements."""
    family = list(table.us)
    orders = [family] if table.ordered else [random.Random(seed).sample(family, len(family)) for seed in range(_SHUFFLES)]
    found = {
        "family": [[table.share(order[:count]) for count in _COUNTS] for order in orders],
        "chosen": [[table.share(chosen(order, table.island, model, count)) for count in _COUNTS] for order in orders],
        "population": [[table.share(bred[:count]) for count in _COUNTS] for bred in (_bred(table, o, model) for o in orders)],
    }
    return {name: [statistics.fmean(shares) for shares in zip(*runs, strict=True)] for name, runs in found.items()}


def _bred(table: Table, order: Sequence[Proposal], model: CostModel | Unknown) -> list[Proposal]:
    """What a search with generations measures, in its order."""
    taken = list(chosen(order, table.island, model, _FIRST))
    while len(taken) < max(_COUNTS):
        measured = {one: us for one in taken if not math.isnan(us := table.us[one])}
        failed = [one for one in taken if one not in measured]
        more = {"count": _FIRST, "seed": len(taken)}
        children = next_generation(measured, order[:_KNOWN], table.recorded, table.island, model, failed=failed, **more)
        if not children:
            break
        taken += children
    return taken


def replayed(kind: str, tables: Sequence[Table]) -> list[dict[str, object]]:
    """A row a table and strategy, each asked of a model that has seen the other shapes only."""
    rows: list[dict[str, object]] = []
    for table in tables:
        known = [one for other in tables if other.shape != table.shape for one in other.timings()]
        model = learn(known, table.island.family)
        told = model.reason if isinstance(model, Unknown) else "off by {:.3f}, the bound by {:.3f}".format(*model.errors)
        for name, shares in curves(table, model).items():
            after = {str(count): round(share, 4) for count, share in zip(_COUNTS, shares, strict=True)}
            facts = {"kind": kind, "case": table.name, "on_record": len(table.us), "records": len(known), "model": told}
            rows.append({**facts, "strategy": name, "share_after": after})
    return rows


def means(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Over the cases of a kind, by strategy."""
    found: dict[tuple[object, object], list[Mapping[str, float]]] = defaultdict(list)
    for row in rows:
        shares = row["share_after"]
        assert isinstance(shares, dict)
        found[row["kind"], row["strategy"]].append(shares)
    return [
        {
            "kind": kind,
            "strategy": strategy,
            "cases": len(all_shares),
            "mean_share_after": {k: round(statistics.fmean(s[k] for s in all_shares), 4) for k in all_shares[0]},
        }
        for (kind, strategy), all_shares in found.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, print the means, write the file."""
    parser = argparse.ArgumentParser(prog="benchmarks.bench_order", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("order.json"))
    args = parser.parse_args(argv)
    rows = replayed("products", products(_RESULTS, exact=False)) + replayed("products fp32", products(_RESULTS, exact=True))
    rows += replayed("programs", programs(_LANDSCAPE))
    summary = means(rows)
    for one in summary:
        shares = one["mean_share_after"]
        assert isinstance(shares, dict)
        print(f"{one['kind']:16}{one['strategy']:12}" + "  ".join(f"{k}: {v:.3f}" for k, v in shares.items()))
    report.save(args.out, report.document("order", {}, rows, means=summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
