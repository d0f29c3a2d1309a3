"""What was compiled once is found again, by what it was compiled from; what cannot be read is
compiled anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_cudal1 import judge
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.records import Candidate, Region, Rejected, Target
from torch_cudal1.kernels import Proposal
from torch_cudal1.search import build_cache
from torch_cudal1.store.cache import build_files
from torch_cudal1.store.context import TuneContext, make_context

ONE, OTHER = (Proposal("norm", {"rows": rows}) for rows in (1, 2))


@pytest.fixture
def region() -> Region:
    with torch.no_grad():
        (captured,) = capture_regions(nn.LayerNorm(16).eval(), (torch.randn(4, 16),))
    return captured


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Proposal]:
    """What the judge's compiler was asked for: the second proposal it refuses."""
    proposals_built: list[Proposal] = []

    def build(
        region: Region, proposals: Sequence[Proposal], *how: judge.EvaluationConfig | Target
    ) -> tuple[Candidate | Rejected, ...]:
        proposals_built.extend(proposals)
        refused = Rejected("it took too long", "timeout")
        return tuple(
            refused
            if proposal == OTHER
            else Candidate(region.program, "eager", "kernels", ("norm",))
            for proposal in proposals
        )

    monkeypatch.setattr(judge, "build_candidates", build)
    return proposals_built


def place_at(folder: Path) -> TuneContext:
    telemetry.reset()
    here = make_context(torch.device("cpu"), Settings(cache_dir=folder))
    return replace(here, target=Target("cuda", "sm_90", "some GPU", "580", torch.__version__, ""))


def answers(region: Region, place: TuneContext) -> tuple[Candidate | Rejected, ...]:
    return build_cache.build_proposals(
        region,
        (OTHER, ONE),
        judge.EvaluationConfig(place.settings, place.contract, torch.device("cpu")),
        place,
    )


def test_a_kernel_is_compiled_once_and_answers_keep_their_order(
    region: Region, compiled: list[Proposal], tmp_path: Path
) -> None:
    first = answers(region, place_at(tmp_path))
    assert [type(answer) for answer in first] == [Rejected, Candidate]
    assert answers(region, place_at(tmp_path)) == first
    assert compiled == [OTHER, ONE, OTHER]  # a refusal may have been a lack of time
    assert telemetry.report().counters["builds_found"] == 1


def test_what_will_never_compile_is_not_asked_again(
    region: Region, compiled: list[Proposal], tmp_path: Path
) -> None:
    never = Rejected(str(NotLowerableError("needs more than the device has")), "build")
    build_cache.store_build(tmp_path, region.program, OTHER, 90, never)
    assert answers(region, place_at(tmp_path))[0] == never
    assert compiled == [ONE]


def test_another_architecture_template_or_fusion_group_is_another_kernel(
    region: Region, compiled: list[Proposal], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(region, place_at(tmp_path))
    assert isinstance(build_cache.find_build(tmp_path, region.program, ONE, 90), Candidate)
    assert isinstance(build_cache.find_build(tmp_path, region.program, ONE, 80), Refusal)
    assert isinstance(
        build_cache.find_build(tmp_path, replace(region.program, outputs=()), ONE, 90), Refusal
    )
    monkeypatch.setattr(build_files, "name_versions", lambda: "templates of tomorrow")
    assert isinstance(build_cache.find_build(tmp_path, region.program, ONE, 90), Refusal)


@pytest.mark.parametrize("damage", [b"", b"{}", b"\x08\0\0\0\0\0\0\0{}      "])
@pytest.mark.parametrize("ending", [".safetensors", ".json"])
def test_a_damaged_file_is_compiled_anew(
    region: Region, compiled: list[Proposal], tmp_path: Path, damage: bytes, ending: str
) -> None:
    answers(region, place_at(tmp_path))
    (path,) = tmp_path.rglob("*.safetensors")
    path.rename(path.with_suffix(ending)).write_bytes(damage)
    assert isinstance(answers(region, place_at(tmp_path))[1], Candidate)
    assert compiled.count(ONE) == 2
