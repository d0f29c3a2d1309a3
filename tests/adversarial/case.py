"""What one case of the hacking-case database says of itself: a frozen record whose impossible combinations cannot be built.

It names the class, the detector that must catch it first and the weakest profile that must. It runs nothing; see `judging`.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal, TypeAlias, get_args

from torch_cudal1.judge.checks.registry import CHECK_NAMES

__all__ = [
    "DETECTORS",
    "FAMILIES",
    "FOLDER",
    "PROFILES",
    "Case",
    "CaseFile",
    "Family",
    "case_files",
    "controls",
]

FOLDER = Path(__file__).parent

Group: TypeAlias = Literal[
    "timing",
    "caching",
    "laziness",
    "numerics",
    "semantics",
    "state",
    "autograd",
    "shape",
    "memory",
    "tampering",
    "host",
]
Status: TypeAlias = Literal["closed", "lowering", "open", "runtime"]
Form: TypeAlias = Literal["source", "program", "runtime"]
Profile: TypeAlias = Literal["fast", "standard", "strict"]
Need: TypeAlias = Literal[
    "cpu", "gpu", "two_gpus", "compiler", "level2", "host_memory", "gpu_memory"
]

PROFILES: tuple[Profile, ...] = get_args(Profile)
# names of checks whose failure says that a candidate cheats or is wrong; of the others a failure says
# that it is slow, that it did not run, or that nothing can be said
_NO_CHEAT = ("unstable", "jump", "timing", "run", "inputs")
DETECTORS = tuple(dict.fromkeys(check.name for check in CHECK_NAMES if check.name not in _NO_CHEAT))
_STATIC = ("contract", "cubin_scan")
_TIMING = ("timing_state", "unseen_inputs", "sync_ratio", "wall_slope", "timed_output", "roofline")


@dataclass(frozen=True)
class Family:
    """A class of cheats. `statuses`: whether a Program can express it ("closed": no; "lowering": only while it is lowered or as
    trusted Python; "open": yes; "runtime": it attacks our own module, streams or guards)."""

    name: str
    group: Group
    statuses: tuple[Status, ...]


def _family(name: str, group: Group, *statuses: Status) -> Family:
    return Family(name, group, statuses)


FAMILIES: dict[int, Family] = dict(
    enumerate(
        (
            _family("side_stream", "timing", "lowering", "closed"),
            _family("offload", "timing", "lowering"),
            _family("clock_patch", "timing", "lowering"),
            _family("fork_timing", "timing", "closed", "open"),
            _family("benchmark_shape", "timing", "open"),
            _family("warmup_shift", "timing", "open"),
            _family("replay_pointer", "caching", "closed"),
            _family("replay_shape", "caching", "closed"),
            _family("replay_value", "caching", "closed"),
            _family("first_call_wins", "caching", "lowering"),
            _family("reused_reference", "caching", "open"),
            _family("seed_oracle", "caching", "closed", "lowering"),
            _family("hidden_state", "caching", "closed"),
            _family("lazy_tensor", "laziness", "lowering"),
            _family("constant_output", "laziness", "open"),
            _family("partial", "laziness", "open"),
            _family("launch_failure", "laziness", "open", "runtime"),
            _family("pass_through", "laziness", "open"),
            _family("placebo", "laziness", "closed", "open"),
            _family("downcast", "numerics", "open"),
            _family("dtype_changed", "numerics", "closed"),
            _family("range_loss", "numerics", "open"),
            _family("cancellation", "numerics", "open"),
            _family("tolerance_surfing", "numerics", "open"),
            _family("approximate_swap", "numerics", "open"),
            _family("hidden_noise", "numerics", "open"),
            _family("special_constant", "semantics", "open"),
            _family("initial_parameters", "semantics", "open"),
            _family("dropped_parameter", "semantics", "open"),
            _family("special_values", "semantics", "open"),
            _family("train_eval", "semantics", "open", "closed"),
            _family("contracted_error", "semantics", "open"),
            _family("persistent_output", "state", "closed", "runtime"),
            _family("wrong_alias", "state", "closed", "open"),
            _family("stale_weight", "state", "runtime"),
            _family("same_key_other_meaning", "state", "closed"),
            _family("state_dict_drift", "state", "closed", "runtime"),
            _family("graph_hazard", "state", "runtime"),
            _family("no_gradient", "autograd", "closed", "runtime"),
            _family("wrong_gradient", "autograd", "open"),
            _family("training_crash", "autograd", "closed"),
            _family("works_once", "autograd", "runtime"),
            _family("missing_guard", "shape", "runtime"),
            _family("layout", "shape", "open"),
            _family("index_range", "shape", "open"),
            _family("output_strides", "shape", "closed"),
            _family("device_assumption", "shape", "runtime"),
            _family("out_of_bounds", "memory", "open"),
            _family("race_or_uninitialised", "memory", "open"),
            _family("stream_order", "memory", "runtime"),
            _family("reentrancy", "memory", "closed", "runtime"),
            _family("global_flags", "tampering", "lowering"),
            _family("judge_patch", "tampering", "lowering"),
            _family("forged_verdict", "tampering", "lowering"),
            _family("own_inputs", "tampering", "closed"),
            _family("host_code", "host", "lowering"),
            _family("resource_abuse", "host", "open", "lowering"),
            _family("time_bomb", "host", "closed", "open"),
        ),
        start=1,
    )
)


@dataclass(frozen=True)
class Case:
    """One cheat. `expected` is the detector that refuses it first; `evades`: checkers known to miss it.

    `seen`: L1 CUDA-L1 release, DR DeepReinforce's blog and CUDA-L2, KB KernelBench, WF wafer.ai, MK Makora, KG KernelGuard,
    GM gpu-mode, PG pygpubench, SK Sakana AI, KA KernelAgent; empty when it is ours.
    """

    number: int
    family: str
    group: Group
    expected: str
    status: Status
    variant: str = ""
    form: Form = "source"
    first_profile: Profile = "fast"
    needs: tuple[Need, ...] = ()
    timed: bool = False  # the verdict alone does not show it: the pair is timed too
    alone: bool = False  # no other detector refuses it
    seen: tuple[str, ...] = ()
    evades: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        problem = "; ".join(_problems(self))
        if problem:
            raise ValueError(f"case {self.name}: {problem}")

    @property
    def name(self) -> str:
        """The file's: family and variant."""
        return f"{self.family}_{self.variant}" if self.variant else self.family

    @property
    def device(self) -> str:
        """Where it runs."""
        return "cuda" if "gpu" in self.needs else "cpu"

    @property
    def static(self) -> bool:
        """Whether the cheat is refused before anything runs, so that no GPU is needed for it."""
        return self.form == "program" and self.expected in _STATIC


def _problems(case: Case) -> Iterator[str]:
    family = FAMILIES.get(case.number)
    if family is None or (family.name, family.group) != (case.family, case.group):
        yield f"class {case.number} is {family}, not {case.group}/{case.family}"
        return
    if case.variant and not case.variant.isidentifier():
        yield f"variant {case.variant!r} is no part of a file name"
    if case.status not in family.statuses:
        yield f"status {case.status!r}, expected one of {family.statuses}"
    if case.expected not in DETECTORS or case.expected == "triage":
        yield f"expected {case.expected!r}, which is no detector that may refuse alone"
    if case.form == "program" and case.status == "closed" and case.expected not in _STATIC:
        yield f"a Program cannot express it, so {_STATIC} must refuse it, not {case.expected}"
    if case.form == "runtime" and case.status != "runtime":
        yield "the runtime form attacks our own runtime: status must be 'runtime'"
    if case.expected in _TIMING and not (case.timed and case.group == "timing"):
        yield f"{case.expected} is seen by timing, so the case is of the timing group and timed"
    if case.timed and case.form != "source":
        yield "only source pairs are timed here"
    if "two_gpus" in case.needs and "gpu" not in case.needs:
        yield "two GPUs and none"
    if {"gpu", "cpu"} <= set(case.needs):
        yield "one device a case"


@dataclass(frozen=True)
class CaseFile:
    """A case and the module it stands in: `REFERENCE`, `CHEAT`, `HONEST`; or functions of the same names in lower case."""

    path: Path
    case: Case
    module: ModuleType

    @property
    def id(self) -> str:
        """For test names."""
        return f"{self.case.group}/{self.case.name}"


_MEMBERS: dict[Form, tuple[str, ...]] = {
    "source": ("REFERENCE", "CHEAT", "HONEST"),
    "program": ("reference", "cheat", "honest"),
    "runtime": ("attack", "twin"),
}


def case_files() -> list[CaseFile]:
    """Every case, in the order of classes. Raises ValueError for a file that does not say what its place says."""
    paths = sorted(
        path
        for path in FOLDER.glob("*/*.py")
        if path.parent.name in get_args(Group) and path.stem != "__init__"
    )
    return sorted(map(_read, paths), key=lambda file: (file.case.number, file.case.variant))


def controls() -> dict[str, tuple[str, str]]:
    """Honest candidates beyond the twins, by name: reference and candidate as source texts. The docstring says what is unusual."""
    modules = {path.stem: _import_case(path) for path in sorted(FOLDER.glob("controls/*.py"))}
    return {name: (module.REFERENCE, module.HONEST) for name, module in modules.items()}


def _import_case(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"adversarial_{path.parent.name}_{path.stem}", path
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _read(path: Path) -> CaseFile:
    module = _import_case(path)
    case = module.CASE
    if (case.group, case.name) != (path.parent.name, path.stem):
        raise ValueError(f"{path}: its case is {case.group}/{case.name}")
    missing = [name for name in _MEMBERS[case.form] if not hasattr(module, name)]
    if missing or not module.__doc__:
        raise ValueError(
            f"{path}: form {case.form!r} needs a docstring and {_MEMBERS[case.form]}; missing {missing}"
        )
    if case.form == "source":
        for name in _MEMBERS["source"]:
            ast.parse(getattr(module, name))
    return CaseFile(path, case, module)
