"""Detectors of memory on a GPU: Programs of one kernel with one thing wrong, and sources in Triton;
the honest twins pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.adversarial.plans import PRODUCT, V, assemble, candidate, on_cuda, op, product
from tests.judge.programs import subject
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import CheckResult, Contract
from torch_cudal1.judge.checks.environment import ENV_DIFF, ENV_DIFF_CALLS
from torch_cudal1.judge.checks.memory.dead_launches import GHOST
from torch_cudal1.judge.checks.memory.fresh_outputs import FRESH_OUTPUT
from torch_cudal1.judge.checks.memory.redzones import GUARD_BAND, GUARD_PAGE
from torch_cudal1.judge.checks.memory.uninitialised_memory import POISON
from torch_cudal1.judge.checks.process import RESOURCE
from torch_cudal1.judge.checks.sanitizer import SANITIZER
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.checks.static.contract import contract
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.profiles import PROFILES
from torch_cudal1.judge.reference.source_reference import SourceCandidate, read_reference
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child, make_limits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

CUDA = torch.device("cuda", 0)

STORE = "st.global.f32 [%d4], %f3;"

# The value read decides something: the assembler drops an unused load, a volatile one too.
# What lies there is PyTorch's in an ordinary run: x before y, y behind x, and a megabyte further
# the rest of its segment.
PEEK = (
    "ld.global.u32 %r5, [%d{}]; setp.eq.u32 %p1, %r5, 2143289345; @%p1 mov.f32 %f3, %f1; " + STORE
)

PEEKING, PEEKING_BEFORE, PEEKING_FAR = (
    PRODUCT.replace(STORE, PEEK.format(place)) for place in ("2+16384", "3+-16384", "2+1048576")
)

SPILLING = PRODUCT.replace(STORE, f"{STORE} st.global.f32 [%d4+524288], %f3;")


def plan_product(text: str = PRODUCT, grid: int = 32) -> Program:
    return on_cuda(product("cuda"), assemble(text), "product", grid=grid)


def decorate() -> Program:
    """The kernel runs, and eager's operator makes the result."""
    product_plan = plan_product()
    return replace(
        product_plan,
        steps=(*product_plan.steps, op("aten.mul.Tensor", V(0), V(1), out=3)),
        outputs=(3,),
    )


def guard_infinities() -> Program:
    """Eager's operators make the result but for infinities, which the kernel is there for."""
    product_plan = plan_product()
    finite = (
        op("aten.mul.Tensor", V(0), V(1), out=3),
        op("aten.clamp.default", V(3), -3e38, 3e38, out=4),
    )
    chosen = (op("aten.isinf.default", V(2), out=5), op("aten.where.self", V(5), V(2), V(4), out=6))
    return replace(product_plan, steps=(*product_plan.steps, *finite, *chosen), outputs=(6,))


CASES = {  # Program, checks after drawing, the one that refuses it (None: none)
    "honest": (
        plan_product,
        (FRESH_OUTPUT, ENV_DIFF_CALLS, POISON, GUARD_BAND, GUARD_PAGE, GHOST, RESOURCE),
        None,
    ),
    "rows left unwritten": (lambda: plan_product(grid=31), (POISON,), "poison"),
    "a block too many": (lambda: plan_product(grid=33), (GUARD_BAND,), "guard_band"),
    "a kernel for show": (decorate, (GHOST,), "ghost"),
    "a kernel for infinities": (guard_infinities, (GHOST,), None),
    "a stray read": (lambda: plan_product(PEEKING), (GUARD_PAGE,), "guard_page"),
    "a stray read before the start": (
        lambda: plan_product(PEEKING_BEFORE),
        (GUARD_PAGE,),
        "guard_page",
    ),
    "a store far away": (lambda: plan_product(SPILLING), (GUARD_PAGE,), "guard_page"),
    "a stray read under the sanitizer": (
        lambda: plan_product(PEEKING_FAR),
        (SANITIZER,),
        "sanitizer",
    ),
    "honest under the sanitizer": (plan_product, (SANITIZER,), None),
}


@pytest.fixture
def child() -> Iterator[Child]:  # a fresh one each: some of these lose theirs
    with Child(make_limits(Settings(), CUDA), Contract()) as running:
        yield running


def run_checks(trial: Trial, *detectors: CheckSpec) -> list[CheckResult]:
    trial.load("candidate", trial.candidate)
    for _ in range(2):
        sample = trial.draw("normal")
        trial.results[sample.name] = trial.run(sample)
    return list(validate(trial, PROFILES["standard"], checks=detectors).checks)


@pytest.mark.parametrize("name", CASES)
def test_a_program_of_one_kernel_is_refused_by_the_check_of_its_fault(
    child: Child, name: str
) -> None:
    make, detectors, refused = CASES[name]
    program = candidate(make())
    assert all(check.passed for check in contract(product("cuda"), program))
    checks = run_checks(
        Trial(subject(product("cuda"), device="cuda"), program, Contract(), CUDA, child), *detectors
    )
    print(checks)
    failed = [check.name for check in checks if not check.passed]
    assert failed == ([refused] if refused else []), checks


def test_a_kernel_that_a_region_hardly_depends_on_is_not_dead(child: Child) -> None:
    """Its result, scaled down, goes through a softmax, for which one number everywhere is as good
    as what it computes.
    """
    region, honest = product("cuda"), plan_product()
    faint = (
        op("aten.mul.Tensor", V(2), 1e-9, out=3),
        op("aten._softmax.default", V(3), -1, False, out=4),
    )
    region = replace(
        region, program=replace(region.program, steps=(*region.program.steps, *faint), outputs=(4,))
    )
    program = candidate(replace(honest, steps=(*honest.steps, *faint), outputs=(4,)))
    checks = run_checks(
        Trial(subject(region, device="cuda"), program, Contract(), CUDA, child), GHOST
    )
    assert all(check.passed for check in checks), checks


REFERENCE = """
import torch
from torch import nn
class Model(nn.Module):
    def forward(self, x, y):
        return x * y
def get_inputs():
    return [torch.randn(64, 64), torch.randn(64, 64)]
def get_init_inputs():
    return []
"""

KERNEL = """
import torch, triton, triton.language as tl
from torch import nn
@triton.jit
def product(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask=mask) * tl.load(y + at, mask=mask), mask=mask)
{more}
class ModelNew(nn.Module):
    def forward(self, x, y):
        out = torch.empty_like(x)
        product[({grid},)](x, y, out, x.numel(), BLOCK=1024)
        {then}
        return out
"""

BEYOND = "    tl.store(out + n + tl.arange(0, 2), 0.0, mask=tl.program_id(0) == 0)\n"

BEYOND_READ = "    seen = tl.load(x + n + at, volatile=True)\n    tl.store(out + at, seen, mask=seen == 12345.678)\n"

SOURCES = {
    "honest": (
        {"more": "", "grid": "4", "then": ""},
        (ENV_DIFF, FRESH_OUTPUT, ENV_DIFF_CALLS, POISON, GUARD_BAND, GUARD_PAGE, RESOURCE),
        None,
    ),
    "a block too few": ({"more": "", "grid": "3", "then": ""}, (POISON,), "poison"),
    "a store beyond the end": (
        {"more": BEYOND, "grid": "4", "then": ""},
        (GUARD_BAND,),
        "guard_band",
    ),
    "a read beyond the end": (
        {"more": BEYOND_READ, "grid": "4", "then": ""},
        (GUARD_PAGE,),
        "guard_page",
    ),
    "device memory each call": (
        {
            "more": "KEPT = []",
            "grid": "4",
            "then": "KEPT.append(torch.ones(1 << 20, device=x.device))",
        },
        (RESOURCE,),
        "resource",
    ),
    "the current device's stream": (
        {"more": "torch.cuda.set_stream(torch.cuda.Stream())", "grid": "4", "then": ""},
        (ENV_DIFF,),
        "env_diff",
    ),
    "TF32": (
        {"more": "torch.backends.cuda.matmul.allow_tf32 = True", "grid": "4", "then": ""},
        (ENV_DIFF,),
        "env_diff",
    ),
    "honest under the sanitizer": ({"more": "", "grid": "4", "then": ""}, (SANITIZER,), None),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_in_triton_is_refused_by_the_check_of_its_fault(name: str) -> None:
    parts, detectors, refused = SOURCES[name]
    with (
        Child(make_limits(Settings(), CUDA), Contract()) as oracle,
        Child(make_limits(Settings(), CUDA), Contract()) as candidate_child,
    ):
        reference, examples = read_reference(oracle, REFERENCE, CUDA)
        text = SourceCandidate(KERNEL.format(**parts))
        checks = run_checks(
            Trial(reference, text, Contract(), CUDA, candidate_child, examples), *detectors
        )
    print(checks)
    assert [check.name for check in checks if not check.passed] == ([refused] if refused else []), (
        checks
    )
