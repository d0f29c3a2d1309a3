"""A baseline of sources that cannot run, is wrong or kills its process is left out with the reason.
The oracle is a stand-in.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.judge.evaluate.source_baselines import LostReferenceProcess, rank_source_baselines
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.source_reference import SourceReference
from torch_cudal1.judge.sandbox.child import CandidateFailure
from torch_cudal1.judge.wire.call_spec import CallSpec
from torch_cudal1.judge.wire.channel import save_tensors

CPU = torch.device("cpu")
INPUT = torch.randn(4, 3)


class ScriptedOracle:
    """Answers like a child whose modules double their input; `does` says what a way of compiling
    does instead.
    """

    def __init__(self, folder: Path, behaviours: dict[str, str]) -> None:
        self.folder, self.behaviours = folder, behaviours
        self.usable = True
        self.ways: dict[str, str] = {}
        self.sets: dict[str, list[torch.Tensor | None]] = {}
        self.files = 0

    def reserve_file(self) -> Path:
        self.files += 1
        return self.folder / str(self.files)

    def call(self, verb: str, **request: Any) -> dict[str, Any]:
        return getattr(self, verb)(**request)

    def put(self, name: str, tensors: Sequence[torch.Tensor | None]) -> None:
        self.sets[name] = list(tensors)

    def load_source(self, slot: str, text: str, form: Any, way: Any) -> dict[str, Any]:
        self.ways[slot] = way["compiled"]
        return {"state": []}

    def run(self, slot: str, inputs: str, path: str, deadline_s: float) -> dict[str, Any]:
        (tensor,) = self.sets[inputs]
        assert tensor is not None
        behaviour = self.behaviours.get(self.ways[slot], "")
        if behaviour == "dies":
            self.usable = False
        if behaviour in ("dies", "raises"):
            raise CandidateFailure("run", "no compiler", "run")
        return {
            "layout": save_tensors([tensor * (3 if behaviour == "is wrong" else 2)], Path(path))
        }

    def bench(self, slots: list[str], sets: list[str], budget_s: float) -> dict[str, Any]:
        assert set(sets) <= set(self.sets)
        times = {"": 10.0, "default": 5.0, "reduce-overhead": 1.0}
        return {"samples": {slot: [times[self.ways[slot]]] * 3 for slot in slots}}


def make_reference(folder: Path, device: torch.device = CPU, **behaviours: str) -> SourceReference:
    form = CallSpec("Model", {"dict": {}}, (), [])
    oracle: Any = ScriptedOracle(
        folder, {name.replace("_", "-"): behaviour for name, behaviour in behaviours.items()}
    )
    return SourceReference(oracle, "text", form, (TensorSpec.of(INPUT),), ("input",), device)


def test_the_fastest_right_baseline_is_the_one_to_beat(tmp_path: Path) -> None:
    ranking = rank_source_baselines(make_reference(tmp_path), [[INPUT]])
    assert (ranking.best, dict(ranking.medians_us), dict(ranking.failures)) == (
        "inductor",
        {"eager": 10.0, "inductor": 5.0},
        {},
    )


def test_against_eager_only_nothing_else_is_compiled(tmp_path: Path) -> None:
    assert (
        dict(
            rank_source_baselines(
                make_reference(tmp_path, default="raises"), [[INPUT]], eager_only=True
            ).failures
        )
        == {}
    )


@pytest.mark.parametrize(
    ("behaviour", "reason"), [("raises", "no compiler"), ("is wrong", "not eager's")]
)
def test_a_baseline_that_fails_is_left_out_with_the_reason(
    behaviour: str, reason: str, tmp_path: Path
) -> None:
    ranking = rank_source_baselines(make_reference(tmp_path, default=behaviour), [[INPUT]])
    assert (ranking.best, set(ranking.medians_us)) == ("eager", {"eager"})
    assert reason in ranking.failures["inductor"]


def test_a_baseline_that_ends_the_oracle_is_named_so_that_the_others_can_be_timed_without_it(
    tmp_path: Path,
) -> None:
    with pytest.raises(LostReferenceProcess) as error_info:
        rank_source_baselines(make_reference(tmp_path, default="dies"), [[INPUT]])
    assert error_info.value.name == "inductor"
    ranking = rank_source_baselines(
        make_reference(tmp_path, default="dies"), [[INPUT]], lost={"inductor": "it died"}
    )
    assert (ranking.best, dict(ranking.failures)) == ("eager", {"inductor": "it died"})


def test_without_eager_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    reference = make_reference(tmp_path)
    reference.oracle.behaviours[""] = "raises"  # type: ignore[attr-defined]
    with pytest.raises(ReferenceFailure, match="no compiler"):
        rank_source_baselines(reference, [[INPUT]])
