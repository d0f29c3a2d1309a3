"""What every task of a run is measured with: profile, precision, columns. Rows of different jobs
never share a table.

A job says nothing about the machine or the version of the package: each row carries those, and the
report keeps them apart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch

__all__ = [
    *(
        "AUTOTUNE",
        "BASELINES",
        "COMPILE",
        "EAGER",
        "GRAPH",
        "LABELS",
        "OURS",
        "PROFILES",
        "REDUCE",
        "RELEASE",
    ),
    *("Job", "Profile", "Rights", "get_dtype", "set_precision"),
]

Rights: TypeAlias = Literal["default", "tf32", "ieee", "bf16"]

EAGER, COMPILE, REDUCE, GRAPH, AUTOTUNE = (
    "eager",
    "torch.compile",
    "reduce-overhead",
    "CUDA graph",
    "max-autotune",
)
BASELINES = (EAGER, COMPILE, REDUCE, GRAPH, AUTOTUNE)
OURS, RELEASE = "cudal1", "CUDA-L1 release"
LABELS: Mapping[Rights, str] = MappingProxyType(
    {
        "default": "float32; TF32 in convolutions only (PyTorch's default), for everyone",
        "tf32": "float32 with TF32 allowed everywhere, for everyone",
        "ieee": "IEEE float32, TF32 nowhere, for everyone",
        "bf16": "bfloat16 weights and inputs, for everyone",
    }
)


@dataclass(frozen=True)
class Profile:
    """How long things may take, in seconds.

    `tune_s`: the search's budget for a task. `measure_s`: the paired measurement's, all columns
    together; with `window` all of it is used, as in the paper. `limit_s`: a task that takes longer
    is ended and counted as failed.
    """

    name: str
    tune_s: float
    measure_s: float
    limit_s: float
    window: bool = False


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        "fast": Profile("fast", tune_s=20.0, measure_s=0.5, limit_s=300.0),
        "quick": Profile("quick", tune_s=30.0, measure_s=1.0, limit_s=240.0),
        "paper": Profile("paper", tune_s=1_200.0, measure_s=1_200.0, limit_s=4_800.0, window=True),
    }
)


@dataclass(frozen=True)
class Job:
    """`arms`: names of the search with parts of it left out (see `ablation`).

    `judged`: the release file, name and start of its digest, whose candidates are a column too; "":
    none. `left_out`: baselines that a task is measured without, since its process does not survive
    them; never the whole run's.
    """

    device: str
    profile: Profile
    rights: Rights = "default"
    mode: Literal["eval", "train"] = "eval"
    scale: int = 1
    ours: bool = True
    autotune: bool = False
    judged: str = ""
    arms: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def baselines(self) -> tuple[str, ...]:
        """The baselines on this device: no CUDA graphs on a CPU, max-autotune where it is asked
        for.
        """
        cuda = torch.device(self.device).type == "cuda"
        names = (
            EAGER,
            COMPILE,
            *((REDUCE, GRAPH) if cuda else ()),
            *((AUTOTUNE,) if self.autotune else ()),
        )
        return tuple(name for name in names if name not in self.left_out)

    @property
    def contenders(self) -> tuple[str, ...]:
        """Columns that are compared with the baselines."""
        return (*((OURS,) if self.ours else ()), *self.arms, *((RELEASE,) if self.judged else ()))

    @property
    def limit_s(self) -> float:
        """The seconds after which a task's process is ended: the profile's limit, and more for
        every further column that is searched or judged.
        """
        return self.profile.limit_s * (2 if self.judged else 1) + 1.5 * self.profile.tune_s * len(
            self.arms
        )

    def withdraw(self, columns: Collection[str]) -> Job:
        """The same job without some of its columns."""
        arms = tuple(arm for arm in self.arms if arm not in columns)
        package_column, release = (
            self.ours and OURS not in columns,
            "" if RELEASE in columns else self.judged,
        )
        return replace(
            self,
            ours=package_column,
            arms=arms,
            judged=release,
            left_out=tuple(name for name in BASELINES if name in columns),
        )

    @property
    def label(self) -> str:
        """Precision and size, as every output names them."""
        small = f"; SIZES CUT DOWN by {self.scale}: no result" if self.scale > 1 else ""
        return LABELS[self.rights] + small

    def to_json(self) -> dict[str, Any]:
        """A JSON object; jobs with equal objects may share a table."""
        left_out = {"left_out": list(self.left_out)} if self.left_out else {}
        values = {name: value for name, value in asdict(self).items() if name != "left_out"}
        return {**values, "arms": list(self.arms), **left_out, "label": self.label}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Job:
        """The inverse of `to_json`."""
        fields = {name: value for name, value in data.items() if name != "label"}
        lists = {name: tuple(data.get(name, ())) for name in ("arms", "left_out")}
        return cls(**{**fields, "profile": Profile(**data["profile"]), **lists})


def get_dtype(rights: Rights) -> torch.dtype | None:
    """What floating-point weights and inputs are converted to; None: as the task makes them."""
    return torch.bfloat16 if rights == "bf16" else None


def set_precision(rights: Rights) -> None:
    """Set the precision switches of this process, the same for every column."""
    torch.set_float32_matmul_precision("high" if rights == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = rights != "ieee"
