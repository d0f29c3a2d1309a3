"""The precision switches of a child: the contract's, and in the user's own words where those say the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from tests.judge.programs import candidate, linear_relu, subject
from torch_cudal1.judge import rights, warm
from torch_cudal1.judge.limits import limits_for
from torch_cudal1.judge.trial import Trial
from torch_cudal1.program.schedule import build
from torch_cudal1.records import Candidate, Contract
from torch_cudal1.settings import Settings

CPU = torch.device("cpu")
MATMUL = torch.backends.cuda.matmul


def said() -> tuple[str, str, bool, bool]:
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return MATMUL.fp32_precision, torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(), warn_only


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    fp32, precision, deterministic, warn_only = said()
    yield
    torch.set_float32_matmul_precision(precision)
    MATMUL.fp32_precision = fp32
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


@pytest.mark.parametrize("word", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("held", [(), ("matmul",)], ids=["IEEE", "TF32"])
def test_a_switch_that_says_what_the_contract_says_stays_as_it_is(word: str, held: tuple[str, ...]) -> None:
    MATMUL.fp32_precision = word
    with rights.under(Contract(rights=held)):
        assert (MATMUL.fp32_precision == "tf32") == bool(held)
        assert (MATMUL.fp32_precision == word) == ((word == "tf32") == bool(held))
    assert word == MATMUL.fp32_precision


def test_a_process_that_applies_untouched_switches_is_left_untouched() -> None:
    before = said()
    rights.apply(rights.flags_for(Contract()))
    assert said() == before


def test_applied_switches_are_the_contract_s() -> None:
    flags = rights.flags_for(Contract(rights=("matmul",)))
    torch.use_deterministic_algorithms(True)
    rights.apply(flags | {"deterministic": False})
    assert (MATMUL.allow_tf32, torch.are_deterministic_algorithms_enabled()) == (True, False)
    rights.apply(rights.flags_for(Contract()) | {"deterministic": True})
    assert (MATMUL.allow_tf32, torch.are_deterministic_algorithms_enabled()) == (False, True)


def test_what_a_child_has_inductor_compile_the_user_s_process_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    region = linear_relu()
    with warm.kept_warm(), warm.lent(limits_for(Settings(), CPU), Contract()) as child:
        asked = Trial(subject(region), candidate(region.program), Contract(), CPU, child)
        asked.load("candidate", Candidate(region.program, "inductor", "baseline"))
        asked.run(asked.draw("normal"))
    counters.clear()
    build(region.program, "inductor", CPU)
    assert (counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]) == (1, 0)
