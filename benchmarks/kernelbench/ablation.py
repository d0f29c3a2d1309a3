"""Arms of an ablation: the same search with some of its techniques left out, and whether the gains
multiply.

Families: "rewrites" of the graph, "kernels" of templates, "compile" (Inductor under a schedule),
"graphs" (CUDA graphs). The arm "only kernels" has the kernels alone, on eager. An arm is a column
like the package's own, paired with it in the same measurement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from benchmarks.kernelbench.job import EAGER, OURS
from benchmarks.kernelbench.statistics import Ratio, compute_geomean, compute_ratios
from torch_cudal1.core.settings import FAMILIES, Settings

__all__ = ["ARMS", "Product", "compute_products", "make_settings", "summarise_products"]

ARMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {f"only {family}": tuple(other for other in FAMILIES if other != family) for family in FAMILIES}
    | {f"without {family}": (family,) for family in FAMILIES}
)


@dataclass(frozen=True)
class Product:
    """One task: the gain of each family alone over eager, the product of these gains, and the gain
    of all together.
    """

    key: str
    alone: Mapping[str, float]
    together: float

    @property
    def product(self) -> float:
        """Product of the single gains; an arm below 1.0 found nothing and counts 1.0."""
        return math.prod(max(1.0, gain) for gain in self.alone.values())

    @property
    def share(self) -> float:
        """Together over product: 1.0 where gains multiply, less where they overlap, more where one
        needs another.
        """
        return self.together / self.product


def make_settings(name: str, settings: Settings) -> Settings:
    """The settings of a column; those of an arm leave families out. Raises KeyError for an unknown
    arm.
    """
    return settings if name == OURS else settings.but(without=ARMS[name])


def compute_products(rows: Iterable[Mapping[str, Any]]) -> list[Product]:
    """The products of every task whose arms were all measured."""
    rows = list(rows)
    single_arms = {
        name: _index_by_key(compute_ratios(rows, name, EAGER))
        for name in ARMS
        if name.startswith("only ")
    }
    together = _index_by_key(compute_ratios(rows, OURS, EAGER))
    keys = [
        key
        for key, ratio in together.items()
        if ratio.measured and all(key in f and f[key].measured for f in single_arms.values())
    ]
    return [
        Product(
            key,
            {name: arm_ratios[key].speedup for name, arm_ratios in single_arms.items()},
            together[key].speedup,
        )
        for key in keys
    ]


def summarise_products(task_products: Iterable[Product]) -> dict[str, float | None]:
    """Geometric means over tasks: each family alone, the product, all together, and together over
    product.
    """
    task_products = list(task_products)
    names = task_products[0].alone if task_products else ()
    alone = {
        name: compute_geomean([max(1.0, product.alone[name]) for product in task_products])
        for name in names
    }
    combined = {
        "product": compute_geomean([product.product for product in task_products]),
        "together": compute_geomean([product.together for product in task_products]),
    }
    return (
        alone
        | combined
        | {"together over product": compute_geomean([product.share for product in task_products])}
    )


def _index_by_key(arm_ratios: Iterable[Ratio]) -> dict[str, Ratio]:
    return {ratio.key: ratio for ratio in arm_ratios}
