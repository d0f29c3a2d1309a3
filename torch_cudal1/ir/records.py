"""The values that travel through the pipeline, frozen, with illegal combinations that cannot be
built.

Region (what is to be computed) -> Candidate (a way to compute it) -> Verdict (is it right) ->
Timing (is it faster; exists only with a passed Verdict) -> Accepted or Rejected -> Entry (what the
cache keeps). They hold facts; the decisions are made in `judge.evaluate.decide`, the files are
written by `store.cache.local_cache`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

from torch_cudal1.ir.program import Program, canonical_json
from torch_cudal1.ir.schedule import Schedule

__all__ = [
    "BY_BLOCKS",
    "DIFFERS_FROM_EAGER",
    "QUICK",
    "Accepted",
    "Candidate",
    "CheckResult",
    "Contract",
    "Decision",
    "Entry",
    "Region",
    "Rejected",
    "Role",
    "Target",
    "Timing",
    "Verdict",
]

# Why a baseline is left out of the comparison although it runs. Stored in entries as this text.
DIFFERS_FROM_EAGER = "its result is not eager's"
# The value of "tier" in the evidence of what the quick tier decided: PyTorch's own ways were timed in
# the user's process, nothing was searched for.
QUICK = "quick"
# And of a deep model: each repeated block was searched for, and the whole is composed of them.
BY_BLOCKS = "blocks"
Role: TypeAlias = Literal["parameter", "buffer", "input"]
Kind: TypeAlias = Literal["inference", "forward", "backward"]
Granularity: TypeAlias = Literal["whole", "block", "island"]
# Counted up when the judge changes what it accepts. It is part of a contract's digest, so entries
# of an older version are evaluated again.
TOLERANCE_VERSION = 4


@dataclass(frozen=True)
class Target:
    """The machine on which an entry was evaluated. `family` decides whether the entry may be used;
    the other fields decide whether it must be evaluated again.
    """

    device: str  # "cpu" or "cuda"
    arch: str  # "sm_90", "x86_64"
    sku: str  # "NVIDIA H200", or the CPU's model name
    driver: str  # CUDA driver version, "" on CPU
    torch: str
    triton: str  # "" where Triton is absent

    @property
    def family(self) -> str:
        """Device type and architecture, such as "cuda-sm_90": part of the cache path."""
        return f"{self.device}-{self.arch}"


@dataclass(frozen=True)
class Contract:
    """How accurate a result must be. `rights` are the op classes that may use TF32: "matmul",
    "conv".
    """

    precision: Literal["match", "strict", "kernelbench"] = "match"
    rights: tuple[str, ...] = ()
    assume_finite: bool = False
    version: int = TOLERANCE_VERSION

    @property
    def digest(self) -> str:
        """Short digest, part of the cache path."""
        # Sorted, so that the order in which rights were found is no part of a path.
        data = [self.precision, sorted(self.rights), self.assume_finite, self.version]
        return hashlib.sha256(canonical_json(data).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Region:
    """A pure sub-computation: the reference Program in canonical form, and what is known about its
    inputs.

    `name` and `roles` are for people and for input making; they are not in the key. `inputs` of the
    Program are numbered by first use seen from the outputs, so the order in which a model was built
    does not matter.
    """

    program: Program
    roles: tuple[Role, ...]
    kind: Kind = "inference"
    granularity: Granularity = "whole"
    name: str = ""

    def __post_init__(self) -> None:
        # The judge makes each input by its role, so there has to be one for each.
        if len(self.roles) != len(self.program.inputs):
            raise ValueError(f"{len(self.roles)} roles for {len(self.program.inputs)} inputs")

    @cached_property
    def key(self) -> str:
        """sha256 of the canonical reference Program: ops, attributes, dtypes, layouts, shapes,
        constants. No names, no weights.
        """
        # Names and weights are left out, so that equal layers of different models share an entry.
        return self.program.digest


@dataclass(frozen=True)
class Candidate:
    """A way to compute a region: a Program under a schedule. `origin`: the source that proposed it
    ("baseline": a denominator). Raises ValueError for a text that is no schedule.
    """

    program: Program
    schedule: Schedule
    origin: str
    techniques: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Entries and callers may give its text; from here on it is the value.
        object.__setattr__(self, "schedule", Schedule.parse(self.schedule))

    @cached_property
    def digest(self) -> str:
        """sha256 over Program and schedule."""
        return hashlib.sha256(f"{self.program.digest}|{self.schedule}".encode()).hexdigest()

    @property
    def label(self) -> str:
        """For tables: "eager", or "diag_matmul -> inductor"."""
        return (
            f"{'+'.join(self.techniques)} -> {self.schedule}" if self.techniques else self.schedule
        )


@dataclass(frozen=True)
class CheckResult:
    """A named check and its result. `value` is the measured number and `limit` the allowed one;
    both are None for a check without numbers.
    """

    name: str
    passed: bool
    value: float | None = None
    limit: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class Verdict:
    """All checks of one candidate, in the order they ran. `profile` names the set of checks:
    "fast", "standard" or "strict".
    """

    checks: tuple[CheckResult, ...]
    profile: str = "fast"

    @property
    def passed(self) -> bool:
        """True when there is at least one check and none failed."""
        # Without any check nothing was shown: `all` of an empty list is True.
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def failure(self) -> CheckResult | None:
        """The first failed check, if any."""
        return next((check for check in self.checks if not check.passed), None)

    @property
    def worst_error_ratio(self) -> float | None:
        """Largest rms error of the candidate over the baseline's own, both against float64; None if
        never measured.
        """
        ratios = [
            check.value
            for check in self.checks
            if check.name == "numerics" and check.value is not None
        ]
        return max(ratios, default=None)


@dataclass(frozen=True)
class Timing:
    """Paired timing of a candidate against the fastest baseline. Speed-ups are baseline time over
    candidate time.

    `profile`: the timing plan. `score`: the number that this profile quotes, None in entries made
    before there were scores. `details`: further measurements as JSON: each state of the L2 cache,
    first calls, host and device time, the GPU's state.
    """

    verdict: Verdict
    baseline: str
    candidate_us: float
    baseline_us: float
    speedup: float
    low: float
    high: float
    pairs: int
    baselines_us: Mapping[str, float] = field(default_factory=dict)
    profile: str = "fast"
    score: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.verdict.passed:
            # Enforced where a Timing is made, so no later code can quote the speed of a wrong
            # candidate.
            raise ValueError("a Timing needs a passed Verdict: a wrong candidate has no speed")
        if not 0 < self.low <= self.speedup <= self.high:
            raise ValueError(
                f"interval [{self.low}, {self.high}] does not hold the speed-up {self.speedup}"
            )

    @property
    def saved_us(self) -> float:
        """Microseconds saved per call; negative when slower."""
        return self.baseline_us - self.candidate_us


@dataclass(frozen=True)
class Accepted:
    """The candidate may be swapped in."""

    timing: Timing


@dataclass(frozen=True)
class Rejected:
    """The candidate may not be swapped in. `detector` names the check or stage, `numbers` holds its
    evidence.
    """

    reason: str
    detector: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    timing: Timing | None = None


Decision: TypeAlias = Accepted | Rejected


@dataclass(frozen=True)
class Entry:
    """What the cache keeps for (region, target, contract): the choice, the evidence, and what was
    tried.

    `choice.origin == "baseline"` records that nothing beat the baselines: it saves the next process
    the search (negative cache). `tried` lists every candidate with its decision as JSON, for
    `explain`; `evidence` holds checks and timing of the choice.
    """

    region_key: str
    region_name: str
    target: Target
    contract: Contract
    choice: Candidate
    evidence: Mapping[str, Any]
    tried: tuple[Mapping[str, Any], ...]
    created: str  # ISO 8601, UTC
    package: str  # version of torch_cudal1

    @property
    def speedup(self) -> float:
        """Conservative speed-up over the best baseline: the lower bound; 1.0 for a baseline, or a
        kernel never timed alone.
        """
        # A kernel of a fusion group is checked alone and timed only inside the whole graph, so its
        # entry has no timing.
        if self.choice.origin == "baseline" or self.evidence.get("granularity") == "island":
            return 1.0
        # Of blocks that were not all benchmarked no sum can be made.
        if self.evidence.get("tier") == BY_BLOCKS and not self.evidence.get("timing"):
            return 1.0
        # The lower bound, so that a noisy measurement promises less.
        return float(self.evidence["timing"]["low"])

    @property
    def without_inductor(self) -> str:
        """Why Inductor was not among the baselines that this choice was compared with; "" if it was,
        or if there was no comparison.
        """
        baselines_us, failures = (
            self.evidence.get("baselines_us"),
            self.evidence.get("baseline_failures"),
        )
        # Block by block it is Inductor as well.
        if (
            not isinstance(baselines_us, Mapping)
            or not baselines_us
            or not baselines_us.keys().isdisjoint(("inductor", "regional"))
        ):
            return ""
        failure = failures.get("inductor") if isinstance(failures, Mapping) else None
        return str(failure or "the search left it out")

    @property
    def is_quick(self) -> bool:
        """Whether the quick tier decided, which searches for nothing: to a search it is a miss."""
        return self.evidence.get("tier") == QUICK
