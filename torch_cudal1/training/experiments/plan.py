"""An experiment as a file that is written, and committed, before its first run: arms, seeds, sizes,
and the primary comparison.

Arms A0 to A11 differ from A6, the paper's method, in one thing each; A12 needs no model. Settings
that a plan leaves out have defaults here, and wrong ones are refused by name. The plan's digest is
in every result, so results of different plans never meet in one table.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from torch_cudal1.core.errors import SettingError
from torch_cudal1.ingest.llm.policy import TinySpec
from torch_cudal1.ingest.llm.reward import RewardKind
from torch_cudal1.ingest.llm.selectors import SelectorName
from torch_cudal1.training.grpo import GrpoConfig
from torch_cudal1.training.stages import CollectConfig, SelfsupConfig
from torch_cudal1.training.supervised import FitConfig

__all__ = [
    "ARMS",
    "COMPARISONS",
    "PRIMARY",
    "Arm",
    "ExperimentPlan",
    "HeldOut",
    "build_dataclass",
    "read_plan",
]

_T = TypeVar("_T")
Start: TypeAlias = Literal["uniform", "climb", "sft", "selfsup"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to spend the budget. `start`: whose weights; `learns`: whether stage 3 trains them."""

    name: str
    title: str
    start: Start = "selfsup"
    learns: bool = True
    selector: SelectorName = "bucket"
    reward: RewardKind = "speedup"
    smoothed: bool = True
    objective: Literal["mean", "max@k"] = "mean"
    without_analysis: bool = False

    def grpo(self, config: GrpoConfig) -> GrpoConfig:
        """Return the plan's settings with those of this arm."""
        smoothing = config.smoothing if self.smoothed else replace(config.smoothing, clip=None)
        return replace(config, objective=self.objective, smoothing=smoothing)


# Each arm differs from A6 in one thing, so that a difference has one cause. A3 and A2 are the
# frozen counterparts: in the rehearsal, policies that learn narrowed their samples and lost to
# frozen ones in the best of 64.
ARMS: Mapping[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(
            name="A0", title="uniform over programs", start="uniform", learns=False, selector="none"
        ),
        Arm(name="A1", title="SFT", start="sft", learns=False, selector="none"),
        Arm(name="A2", title="SFT + self-supervised", learns=False, selector="none"),
        Arm(name="A3", title="evolve: frozen A2 + bucket exemplars", learns=False),
        Arm(name="A4", title="GRPO, no exemplars", selector="none"),
        Arm(name="A5", title="GRPO + random exemplars", selector="random"),
        Arm(name="A6", title="GRPO + bucket exemplars (the paper's method)"),
        Arm(name="A7", title="GRPO + island exemplars", selector="island"),
        Arm(name="A8", title="A6 without analysis", without_analysis=True),
        Arm(name="A9", title="A6 without smoothing", smoothed=False),
        Arm(name="A10", title="A6 with milestone reward", reward="milestone"),
        Arm(name="A11", title="A6 with max@k objective", objective="max@k"),
        Arm(name="A12", title="hill climbing by rule", start="climb", learns=False, selector="top"),
    )
}
# The endpoint that was registered before the first run: bucket exemplars against none. All other
# comparisons are corrected for their number (Holm).
PRIMARY = ("A6", "A4")
COMPARISONS = (
    PRIMARY,
    # The paper's table 5: random exemplars are worse than none (2.14 against 2.41), islands equal
    # to buckets (3.21 and 3.12). A5 - A4 and A6 - A7 below can confirm or refute both.
    ("A6", "A5"),
    ("A5", "A4"),
    ("A6", "A7"),
    ("A6", "A3"),
    ("A6", "A8"),
    ("A6", "A9"),
    ("A6", "A10"),
    ("A6", "A11"),
)


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """How a policy is tested on tasks it was not trained on, without gradients.

    `measurements`: different programs for each task. `cap`: samples for each task, for policies
    that repeat themselves. `round`: samples between two views of the database. `seeds`: programs of
    a task that every arm is shown; they may be exemplars, and do not count as found.
    """

    measurements: int = 64
    # A policy after stage 3 may know only two or three programs of a task: without a cap its test
    # would never reach 64 different ones.
    cap: int = 256
    round: int = 8
    seeds: int = 2
    temperature: float = 1.0
    reported: tuple[int, ...] = (1, 4, 16, 64)

    def __post_init__(self) -> None:
        if (
            min(self.measurements, self.round, self.seeds) < 1
            # A cap below the measurements could never be met by a policy without repetitions.
            or self.cap < self.measurements
            or not self.reported
        ):
            raise SettingError(
                "held_out",
                str(self),
                "counts of at least 1, and a cap of at least as many samples as measurements",
            )


@dataclass(frozen=True, kw_only=True)
class ExperimentPlan:
    """Everything that decides an experiment's outcome, except the code and the landscape. `budget`:
    different programs in stage 3.

    `train_tasks`, `held_out_tasks`: how many tasks, spread evenly over those of the split; None:
    all.
    """

    name: str
    device: Literal["cpu", "cuda"]
    endpoint: str
    arms: tuple[str, ...] = tuple(ARMS)
    # In the rehearsal the paired difference at 64 measurements had a deviation of 0.10 to 0.16 over
    # seeds: 8 seeds detect about 0.10 in log speed-up at 80 % power, 0.05 would need about 30.
    seeds: tuple[int, ...] = tuple(range(8))
    landscape: str = ""
    train_tasks: int | None = None
    held_out_tasks: int | None = None
    # 100 steps of 64 samples, as far as no program comes twice.
    budget: int = 6400
    max_new_tokens: int = 40
    model: TinySpec = field(default_factory=TinySpec)
    collect: CollectConfig = field(default_factory=CollectConfig)
    sft: FitConfig = field(default_factory=FitConfig)
    selfsup: SelfsupConfig = field(default_factory=SelfsupConfig)
    rl: GrpoConfig = field(default_factory=GrpoConfig)
    held_out: HeldOut = field(default_factory=HeldOut)

    def __post_init__(self) -> None:
        if unknown := [name for name in self.arms if name not in ARMS]:
            raise SettingError("arms", unknown, f"some of {', '.join(ARMS)}")
        if (
            not self.arms
            or not self.seeds
            # A seed that is listed twice would count as two independent runs.
            or len(set(self.seeds)) < len(self.seeds)
            or self.budget < 1
        ):
            raise SettingError(
                "arms, seeds, budget",
                (self.arms, self.seeds, self.budget),
                "some arms, different seeds, a budget",
            )

    @property
    def digest(self) -> str:
        """Digest of all settings but arms and seeds: an experiment can be extended by more of
        those.
        """
        settings = dataclasses.asdict(self)
        # Everything else changes what a result means. More arms or seeds add results and change
        # none.
        settings.pop("arms"), settings.pop("seeds")
        # Sorted keys: the digest depends on values, not on the order of fields in a file.
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def read_plan(path: Path) -> ExperimentPlan:
    """The plan in a JSON file. Raises SettingError for another file, an unknown name, or a value of
    another type.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError("plan", str(path), f"a JSON file that can be read ({error})") from error
    return build_dataclass(ExperimentPlan, content, "plan")


def build_dataclass(dataclass_type: type[_T], content: Any, where: str) -> _T:
    """A dataclass from a JSON object, nested ones too. Raises SettingError naming what is unknown,
    missing or of another type.
    """
    # Annotations are strings here (`from __future__ import annotations`); this resolves them.
    hints = get_type_hints(dataclass_type)
    names = {dataclass_field.name for dataclass_field in fields(dataclass_type)}  # type: ignore[arg-type]
    # An unknown name is refused: with a misspelt setting ignored, the default would run under the
    # plan's name.
    if not isinstance(content, dict) or not set(content) <= names:
        wrong = sorted(set(content) - names) if isinstance(content, dict) else content
        raise SettingError(where, wrong, f"some of {', '.join(sorted(names))}")
    try:
        return dataclass_type(
            **{
                name: _convert_value(hints[name], value, f"{where}.{name}")
                for name, value in content.items()
            }
        )
    except TypeError as error:
        raise SettingError(where, sorted(content), f"all that has no default ({error})") from error


def _convert_value(hint: Any, value: Any, where: str) -> Any:
    if is_dataclass(hint) and isinstance(hint, type):
        return build_dataclass(hint, value, where)
    # JSON has no tuples, and a frozen plan must hold values that cannot change.
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_convert_value(get_args(hint)[0], each, where) for each in value)
    options = get_args(hint)
    # X | None with X a dataclass, such as the settings of TRL in a run.
    if isinstance(value, dict):
        for option in options:
            if is_dataclass(option) and isinstance(option, type):
                return build_dataclass(option, value, where)
    if get_origin(hint) is Literal:
        fits = value in options
    # X | None with X a plain type.
    elif options:
        fits = value is None or any(_is_instance(value, option) for option in options)
    else:
        fits = _is_instance(value, hint)
    if not fits:
        raise SettingError(
            where, value, f"{' or '.join(map(str, options)) if options else hint.__name__}"
        )
    return value


def _is_instance(value: Any, kind: Any) -> bool:
    # A person writes 1 for 1.0 in a JSON file. bool is a subclass of int in Python, and `true` is
    # no number of steps.
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return (
        kind is not type(None)
        and isinstance(value, kind)
        and (kind is bool or not isinstance(value, bool))
    )
