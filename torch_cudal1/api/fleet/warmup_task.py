"""Orders, tasks and answers of workers, as values with a JSON form: they travel between processes and
are kept in a journal.

Nothing is loaded, run or written here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch_cudal1.api.warmup import WarmupResult
from torch_cudal1.core.report import EndToEnd, Explanation, Interval, RegionReport, plain
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.program import canonical_json
from torch_cudal1.store.recording_file import CallRecord, Mode

__all__ = ["WarmupAnswer", "WarmupOrder", "WarmupTask", "call_record_of", "encode_signature"]

# `record` and `on_mismatch` are about serving, and the latter may be a function, which has no JSON
# form. `llm_key` is a secret, which no file may hold.
_HERE_ONLY = (
    "record",
    "on_mismatch",
    "llm_key",
)
_NUMBERS = (
    "speedup",
    "low",
    "high",
    "runs_us",
    "error_ratio",
    "worst_error",
    "eager_us",
    "inductor_us",
    "ours_us",
)


@dataclass(frozen=True)
class WarmupTask:
    """One thing to warm: a single TARGET, at its own inputs or at a recorded `signature` (see
    `encode_signature`; "" for its own).
    """

    target: str
    signature: str = ""

    @property
    def label(self) -> str:
        """For people."""
        digest = hashlib.sha256(self.signature.encode()).hexdigest()[:8]
        return f"{self.target} at form {digest}" if self.signature else self.target

    @property
    def identity(self) -> str:
        """A digest of target, signature and the target's file as it is now: after an edit it is
        another task.
        """
        path = Path(
            self.target.rpartition(":")[0] if ":" in self.target else self.target
        ).expanduser()
        # After an edit of the file the finished work of an earlier run does not count.
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        name = str(path.resolve()) + self.target.removeprefix(str(path)) if content else self.target
        return hashlib.sha256(canonical_json([name, content, self.signature]).encode()).hexdigest()


@dataclass(frozen=True)
class WarmupOrder:
    """What all tasks of a warm-up share: settings, whether gradients are wanted, and the device
    type ("cpu", "cuda").
    """

    settings: Settings
    training: bool = False
    device: str = "cpu"

    def to_json(self) -> dict[str, Any]:
        """A JSON object; what concerns serving alone is left out."""
        settings = {
            f.name: getattr(self.settings, f.name)
            for f in fields(Settings)
            if f.name not in _HERE_ONLY
        }
        return {"settings": plain(settings), "training": self.training, "device": self.device}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WarmupOrder:
        """The inverse of `to_json`."""
        settings: dict[str, Any] = {
            # JSON has no tuples: fields that are tuples came back as lists.
            n: tuple(v) if isinstance(v, list) else v
            for n, v in data["settings"].items()
        }
        return cls(Settings(**settings), bool(data["training"]), str(data["device"]))

    def with_cache(self, folder: Path) -> WarmupOrder:
        """The same with another cache, and no other."""
        return replace(
            # Nothing of another cache: the worker must send back everything that it decided.
            self,
            settings=self.settings.but(cache_dir=folder, read_only_caches=(), shipped=False),
        )


@dataclass(frozen=True)
class WarmupAnswer:
    """The outcome of a task: its result, or why it has none.

    `unusable`: the TARGET cannot be loaded or called, which no second attempt changes; `died`: its
    worker died twice. `resumed`: an earlier run that was interrupted had finished it.
    """

    task: WarmupTask
    result: WarmupResult | None = None
    unusable: str = ""
    died: str = ""
    resumed: bool = False

    def __post_init__(self) -> None:
        # Two of them at once would let a dead worker's task pass for finished.
        if sum((self.result is not None, bool(self.unusable), bool(self.died))) != 1:
            raise ValueError("an answer is one of a result, an unusable target and a dead worker")

    @property
    def is_finished(self) -> bool:
        """True when there is nothing left to do: every decision was made and stored."""
        return self.result is not None and not self.result.error

    @property
    def keys(self) -> tuple[str, ...]:
        """The regions that it decided."""
        explanation = self.result.explanation if self.result else None
        return (
            tuple(dict.fromkeys(region.key for region in explanation.regions))
            if explanation
            else ()
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {"target": self.task.target, "signature": self.task.signature} | {
            name: plain(getattr(self, name)) for name in ("result", "unusable", "died")
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WarmupAnswer:
        """The inverse of `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        result = None if data["result"] is None else _decode_result(data["result"])
        return cls(
            WarmupTask(data["target"], data["signature"]), result, data["unusable"], data["died"]
        )


def encode_signature(record: CallRecord) -> str:
    """A recorded form of call as a task's signature: how often it came is not part of it."""
    # How often a form came changes with every recording; finished work must still be recognised.
    return canonical_json(asdict(replace(record, calls=1)))


def call_record_of(signature: str) -> CallRecord:
    """The inverse of `encode_signature`. Raises ValueError, TypeError or LookupError for anything else."""
    fields = json.loads(signature)
    mode = Mode(
        fields["mode"]["grad"],
        fields["mode"]["training"],
        tuple((kind, dtype) for kind, dtype in fields["mode"]["autocast"]),
    )
    return CallRecord(**{**fields, "mode": mode})


def _decode_result(data: Mapping[str, Any]) -> WarmupResult:
    explanation = data["explanation"]
    return WarmupResult(
        **{**data, "explanation": None if explanation is None else _decode_explanation(explanation)}
    )


def _decode_explanation(data: Mapping[str, Any]) -> Explanation:
    end_to_end = data["end_to_end"]
    converted = {
        **data,
        "regions": tuple(_decode_region(region) for region in data["regions"]),
        "left_out": tuple(data["left_out"]),
        "gate": tuple(data["gate"]),
        "end_to_end": None if end_to_end is None else EndToEnd(**_decode_numbers(end_to_end)),
    }
    return Explanation(**converted)


def _decode_region(data: Mapping[str, Any]) -> RegionReport:
    lists = {name: tuple(data[name]) for name in ("techniques", "raced", "tried") if name in data}
    return RegionReport(**{**_decode_numbers(data), **lists})


def _decode_numbers(data: Mapping[str, Any]) -> dict[str, Any]:
    # `plain` writes a number that JSON has no word for as "inf", "-inf" or "nan"
    numbers = {name: float(data[name]) for name in _NUMBERS if isinstance(data.get(name), str)}
    intervals = {
        name: Interval(**data[name])
        for name in ("vs_eager", "vs_inductor")
        if data[name] is not None
    }
    return {**data, **numbers, **intervals}
