"""The precision switches of a child: the contract's, and in the user's own words where those say
the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.wire import precision_rights

MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def switch() -> Iterator[None]:
    before = MATMUL.fp32_precision
    yield
    MATMUL.fp32_precision = before


@pytest.mark.parametrize("word", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("rights", [(), ("matmul",)], ids=["IEEE", "TF32"])
def test_a_switch_that_says_what_the_contract_says_stays_as_it_is(
    word: str, rights: tuple[str, ...]
) -> None:
    MATMUL.fp32_precision = word
    with precision_rights.enforce_rights(Contract(rights=rights)):
        assert (MATMUL.fp32_precision == "tf32") == bool(rights)
        assert (MATMUL.fp32_precision == word) == ((word == "tf32") == bool(rights))
    assert word == MATMUL.fp32_precision


APPLIED = """
import sys
import torch
from torch_cudal1.judge.wire import precision_rights as rights
from torch_cudal1.ir.records import Contract

def said():
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision, torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(), warn_only

before = said()
rights.apply(rights.choose_flags(Contract()))
assert said() == before, (said(), before)
torch.use_deterministic_algorithms(True)
flags = rights.choose_flags(Contract(rights=("matmul",)))
rights.apply(flags | {"deterministic": False})
assert said()[:3] == ("tf32", "high", False), said()
rights.apply(rights.choose_flags(Contract()) | {"deterministic": True})
assert said()[:3] == ("ieee", "highest", True), said()
"""


def test_applied_switches_are_the_contract_s_and_what_says_so_already_is_left_untouched() -> None:
    run_program(APPLIED)


FOUND = """
import sys
import torch
from torch._dynamo.utils import counters
from tests.judge.programs import candidate, linear_relu, subject
from torch_cudal1.judge.sandbox import worker_pool
from torch_cudal1.judge.sandbox.limits import make_limits
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.runtime.runner import build_runner
from torch_cudal1.ir.records import Candidate, Contract
from torch_cudal1.core.settings import Settings

cpu, region = torch.device("cpu"), linear_relu()
with worker_pool.pool_scope(), worker_pool.acquire(make_limits(Settings(), cpu), Contract()) as child:
    asked = Trial(subject(region), candidate(region.program), Contract(), cpu, child)
    asked.load("candidate", Candidate(region.program, "inductor", "baseline"))
    asked.run(asked.draw("normal"))
build_runner(region.program, "inductor", cpu)
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


def test_the_users_process_finds_what_inductor_compiled_in_a_child(tmp_path: Path) -> None:
    assert run_program(FOUND, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)).split() == ["1", "0"]


def run_program(script: str, **variables: str) -> str:
    """In a process of its own, where no switch was set before and none is read after."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), **variables}
    completed = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    return completed.stdout
