"""Arms: the same search with some of its techniques left out, and whether what they gain
multiplies.

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
from benchmarks.kernelbench.statistics import Ratio, geomean, ratios
from torch_cudal1.core.settings import FAMILIES, Settings

__all__ = ["ARMS", "Product", "products", "settings_of", "told"]

ARMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {f"only {family}": tuple(other for other in FAMILIES if other != family) for family in FAMILIES}
    | {f"without {family}": (family,) for family in FAMILIES}
)


@dataclass(frozen=True)
class Product:
    """One task: what each family gains alone over eager, their product, and what all of them gain
    together.
    """

    key: str
    alone: Mapping[str, float]
    together: float

    @property
    def product(self) -> float:
        """Of the gains alone; an arm below 1.0 had nothing to offer and counts 1.0."""
        return math.prod(max(1.0, gain) for gain in self.alone.values())

    @property
    def share(self) -> float:
        """Together over product: 1.0 where gains multiply, less where they overlap, more where one
        needs another.
        """
        return self.together / self.product


def settings_of(name: str, settings: Settings) -> Settings:
    """The settings of a column: those of an arm leave its families out. Raises KeyError for an arm
    that is none.
    """
    return settings if name == OURS else settings.but(without=ARMS[name])


def products(rows: Iterable[Mapping[str, Any]]) -> list[Product]:
    """For every task whose arms were all measured."""
    rows = list(rows)
    only = {name: _by_key(ratios(rows, name, EAGER)) for name in ARMS if name.startswith("only ")}
    together = _by_key(ratios(rows, OURS, EAGER))
    keys = [
        key
        for key, ratio in together.items()
        if ratio.measured and all(key in f and f[key].measured for f in only.values())
    ]
    return [
        Product(
            key, {name: found[key].speedup for name, found in only.items()}, together[key].speedup
        )
        for key in keys
    ]


def told(found: Iterable[Product]) -> dict[str, float | None]:
    """Geometric means over tasks: each family alone, the product, all together, and together over
    product.
    """
    found = list(found)
    names = found[0].alone if found else ()
    alone = {name: geomean([max(1.0, one.alone[name]) for one in found]) for name in names}
    whole = {
        "product": geomean([one.product for one in found]),
        "together": geomean([one.together for one in found]),
    }
    return alone | whole | {"together over product": geomean([one.share for one in found])}


def _by_key(found: Iterable[Ratio]) -> dict[str, Ratio]:
    return {ratio.key: ratio for ratio in found}
