"""Late, unwritten, stray and leaking memory is found in sources and Programs, and the honest twin
beside each attack passes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.judge.programs import V, candidate, linear_relu, op, subject
from tests.judge.sources import SourceBench, source, source_bench
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Contract, Verdict
from torch_cudal1.judge.checks.memory import dead_launches
from torch_cudal1.judge.checks.memory.dead_launches import GHOST
from torch_cudal1.judge.checks.memory.fresh_outputs import FRESH_OUTPUT
from torch_cudal1.judge.checks.memory.redzones import GUARD_BAND, GUARD_PAGE
from torch_cudal1.judge.checks.memory.uninitialised_memory import POISON
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.checks.process import ISOLATION, RESOURCE
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.checks.static.contract import contract
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child, make_limits
from torch_cudal1.judge.sandbox.tripwires import Tripwires
from torch_cudal1.judge.wire.channel import load_tensors, save_tensors
from torch_cudal1.judge.wire.tensor_bits import same_bits
from torch_cudal1.judge.worker.raw_copy import RefusedOutput, raw_tensors, refuse_lazy

CPU = torch.device("cpu")
LATE = """
import threading, time
CALLS = []
def later(out, result):
    time.sleep(0.02)
    with torch.no_grad():
        out.copy_(result)
"""
LAZY = """
class Later(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})
"""
NAMED = "Tensor = type('Tensor', (torch.Tensor,), {})\nTensor.__module__ = 'torch'\n"
MODE = """
from torch.overrides import TorchFunctionMode
class Waiting(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))
"""
BESIDE = (
    # elsewhere anything may lie there, NaN too
    "import ctypes\nbeyond = 0.0\nif x.untyped_storage().nbytes() > 4 * x.numel():\n"
    "    beyond = ctypes.c_float.from_address(x.data_ptr() + 4 * x.numel()).value"
)

# what the source does, which detectors are asked, which must refuse (None: it passes), a word of
# the reason
SOURCES: dict[str, tuple[dict[str, str], tuple[CheckSpec, ...], str | None, str]] = {
    "a subclass": (
        {"top": LAZY, "result": "torch.relu(self.linear(x)).as_subclass(Later)"},
        (),
        "fresh_output",
        "Later",
    ),
    "a subclass that bears torch's name": (
        {"top": NAMED, "result": "torch.relu(self.linear(x)).as_subclass(Tensor)"},
        (),
        "fresh_output",
        "",
    ),
    "a mode left on": (
        {"top": MODE, "before": "Waiting().__enter__()"},
        (),
        "fresh_output",
        "modes",
    ),
    "no memory behind it": (
        {"result": "torch.relu(self.linear(x)).to('meta')"},
        (),
        "fresh_output",
        "",
    ),
    "a view of one's own result": (
        {"result": "torch.relu(self.linear(x)).unsqueeze(0).squeeze(0)"},
        (FRESH_OUTPUT,),
        None,
        "",
    ),
    # only where it would not show by luck: in memory that holds one byte over and over
    "a row left unwritten": (
        {
            "before": "full = torch.relu(self.linear(x))\nout = torch.empty_like(full)\nout[:-1] = full[:-1]\n"
            "found = out[-1].view(torch.uint8)\nif not (found == found[0]).all() or found[0] == 0:\n    out[-1] = full[-1]",
            "result": "out",
        },
        (POISON,),
        "poison",
        "nothing wrote them",
    ),
    # only where that is NaN throughout: some by luck would show sooner
    "stale memory times zero": (
        {
            "before": "stale = torch.empty(32, 64)\nif not stale.isnan().all():\n    stale.zero_()",
            "result": "stale.mul_(0).add_(torch.relu(self.linear(x)))",
        },
        (POISON,),
        "poison",
        "NaN",
    ),
    "empty, then fully written": (
        {"result": "torch.empty(32, 64).copy_(torch.relu(self.linear(x)))"},
        (POISON,),
        None,
        "",
    ),
    "an accumulator set to zero": (
        {"result": "torch.empty(32, 64).zero_().add_(torch.relu(self.linear(x)))"},
        (POISON,),
        None,
        "",
    ),
    "a read beyond the end": (
        {
            "before": BESIDE,
            "result": "torch.relu(self.linear(x)) + 0.0 * (0.0 if abs(beyond) < 1e30 else beyond)",
        },
        (GUARD_BAND,),
        "guard_band",
        "beside the inputs",
    ),
    "a store before the start": (
        {
            "before": "import ctypes\nif x.untyped_storage().nbytes() > 4 * x.numel():\n    ctypes.memset(x.data_ptr() - 4, 7, 4)"
        },
        (GUARD_BAND,),
        "guard_band",
        "beside input",
    ),
    "a store beyond the end": (
        {
            "before": "import ctypes\nif x.untyped_storage().nbytes() > 4 * x.numel():\n"
            "    ctypes.memset(x.data_ptr() + 4 * x.numel() + 60000, 7, 4)"
        },
        (GUARD_BAND,),
        "guard_band",
        "beside input",
    ),
    "a read behind the end that nothing shows": (
        {"before": "import ctypes\nctypes.string_at(x.data_ptr() + 4 * x.numel(), 4)"},
        (GUARD_BAND, GUARD_PAGE),
        "guard_page",
        "SIGSEGV",
    ),
    "a read before the start that nothing shows": (
        {"before": "import ctypes\nctypes.string_at(x.data_ptr() - 4, 4)"},
        (GUARD_BAND, GUARD_PAGE),
        "guard_page",
        "SIGSEGV",
    ),
    "other values at an edge": (
        # a pipe refuses a byte that nobody may read; an address alone would not tell, plain inputs
        # may start at a page too
        {
            "top": "import ctypes, os\nLIBC, INTO = ctypes.CDLL(None), os.pipe()[1]\n",
            "before": "sides = (x.data_ptr() - 1, x.data_ptr() + 4 * x.numel())\n"
            "edge = all(LIBC.write(INTO, ctypes.c_void_p(side), 1) < 0 for side in sides)",
            "result": "torch.relu(self.linear(x)) + float(edge)",
        },
        (GUARD_PAGE,),
        "guard_page",
        "is wrong",
    ),
    "a raw read of all of its input": (
        {"before": "import ctypes\nctypes.string_at(x.data_ptr(), 4 * x.numel())"},
        (GUARD_PAGE, GUARD_BAND),
        None,
        "",
    ),
    "a raw store into its own output": (
        {
            "before": "import ctypes\nout = torch.relu(self.linear(x))\ncopy = out.clone()\n"
            "ctypes.memmove(out.data_ptr(), copy.data_ptr(), 64)",
            "result": "out",
        },
        (GUARD_BAND, POISON),
        None,
        "",
    ),
    "filled in later": (
        {
            "top": LATE,
            "before": "out = torch.relu(self.linear(x))\nCALLS.append(1)\n"
            "if len(CALLS) > 3:\n    threading.Thread(target=later, args=(out, out.clone() + 1)).start()",
            "result": "out",
        },
        (RESOURCE,),
        "resource",
        "ms after the call",
    ),
    "a thread each call": (
        {
            "top": "import threading\nSTOP = threading.Event()\n",
            "before": "threading.Thread(target=STOP.wait, daemon=True).start()",
        },
        (RESOURCE,),
        "resource",
        "threads grow",
    ),
    "one thread for ever": (
        {
            "top": "import threading\nSTOP = threading.Event()\nthreading.Thread(target=STOP.wait, daemon=True).start()\n"
        },
        (RESOURCE,),
        "resource",
        "thread of its own",
    ),
    "memory each call": (
        {"top": "KEPT = []\n", "before": "KEPT.append(torch.ones(1 << 18))"},
        (RESOURCE,),
        "resource",
        "bytes grow",
    ),
    "memory that is never touched": (
        {"top": "KEPT = []\n", "before": "KEPT.append(torch.empty(1 << 20))"},
        (RESOURCE,),
        "resource",
        "data bytes grow",
    ),
    "a descriptor each call": (
        {"top": "import os\n", "before": "os.open('/dev/null', os.O_RDONLY)"},
        (RESOURCE,),
        "resource",
        "descriptors grow",
    ),
    "a file each call": (
        {"top": "import tempfile\n", "before": "tempfile.NamedTemporaryFile(delete=False).close()"},
        (RESOURCE,),
        "resource",
        "files grow",
    ),
    "scratch that is freed": (
        {"before": "scratch = torch.ones(1 << 21)"},
        (RESOURCE, ISOLATION),
        None,
        "",
    ),
    "the first parallel call": (
        {"init": "self.__dict__['large'] = torch.ones(1 << 16)", "before": "self.large * 2"},
        (RESOURCE, ISOLATION),
        None,
        "",
    ),
}


@pytest.fixture(scope="module")
def bench() -> Iterator[SourceBench]:
    with source_bench() as made:
        yield made


@pytest.mark.parametrize("name", SOURCES)
def test_a_source(bench: SourceBench, name: str) -> None:
    parts, detectors, refused, word = SOURCES[name]
    check = bench.last(source(**parts), NUMERICS, *detectors)
    assert check.passed == (refused is None), check
    if refused:
        assert check.name == refused, check
        assert word in check.detail, check


REGION = linear_relu()
Judge = Callable[..., Verdict]


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child(make_limits(Settings(), CPU), Contract()) as running:
        yield running


def test_the_reference_program_passes_every_one_of_these(child: Child) -> None:
    trial = Trial(subject(REGION), candidate(REGION.program), Contract(), CPU, child)
    trial.load("candidate", candidate(REGION.program))
    verdict = validate(
        trial,
        checks=(
            NUMERICS,
            FRESH_OUTPUT,
            POISON,
            GUARD_BAND,
            GUARD_PAGE,
            GHOST,
            RESOURCE,
            ISOLATION,
        ),
    )
    assert verdict.passed, verdict.failure
    assert {check.name for check in verdict.checks} >= {
        "poison",
        "guard_band",
        "guard_page",
        "ghost",
        "resource",
        "isolation",
    }


def test_a_program_that_reads_what_nobody_wrote_is_refused(child: Child) -> None:
    """As an operator that another torch might allow: the contract refuses it first."""
    empty = op("aten.empty_like.default", V(4), out=5)
    steps = (
        *REGION.program.steps[:2],
        empty,
        op("aten.mul.Scalar", V(5), 0.0, out=6),
        op("aten.add.Tensor", V(4), V(6), out=7),
    )
    program: Program = replace(
        REGION.program, steps=(*steps, op("aten.relu.default", V(7), out=8)), outputs=(8,)
    )
    assert not contract(REGION, candidate(program))[0].passed
    trial = Trial(subject(REGION), candidate(program), Contract(), CPU, child)
    trial.load("candidate", candidate(program))
    trial.draw("normal")
    trial.draw("shifted")
    failure = validate(trial, checks=(POISON,)).failure
    assert failure is not None
    assert failure.name == "poison"


def test_bytes_of_plain_tensors_arrive_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "outputs"
    tensors = [
        torch.randn(3, 4),
        None,
        torch.randn(4, 3).t(),
        torch.randn(5, 7)[1:, ::2],
        torch.randn(1).expand(4),
        torch.empty(0, 3),
        torch.tensor(True),
        torch.randn(3, dtype=torch.bfloat16),
    ]
    back = load_tensors(raw_tensors(tensors, path), path, CPU)
    for one, other in zip(tensors, back, strict=True):
        assert (one is None) == (other is None)
        assert (
            one is None
            or other is None
            or (same_bits(one, other) and one.stride() == other.stride())
        )
    conjugated = torch.randn(3, dtype=torch.complex64).conj()
    (again,) = load_tensors(raw_tensors([conjugated], path), path, CPU)
    assert again is not None
    assert torch.equal(again, conjugated)
    plain = save_tensors([tensors[0]], path)
    assert plain == raw_tensors([tensors[0]], path)


def test_an_output_that_waits_is_refused_before_it_is_touched() -> None:
    class Late(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, function: object, types: object, args: object = (), kwargs: object = None
        ) -> object:
            raise AssertionError("touched")

    late = torch.ones(3).as_subclass(Late)
    with pytest.raises(RefusedOutput, match=r"Late, expected exactly torch\.Tensor"):
        refuse_lazy([None, late])
    refuse_lazy([None, torch.ones(3), torch.nn.Parameter(torch.ones(2))])


def test_an_output_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    short = torch.ones(16)
    short.untyped_storage().resize_(8)
    with pytest.raises(RefusedOutput, match="its storage has 8"):
        raw_tensors([short], tmp_path / "outputs")


@pytest.mark.parametrize("act", ["write", "delete", "connect", "nothing"])
def test_canaries_tell_that_they_were_touched(act: str) -> None:
    canaries = Tripwires()
    try:
        assert canaries.path is not None
        assert canaries.port is not None
        if act == "write":
            canaries.path.write_text("here")
        elif act == "delete":
            canaries.path.unlink()
        elif act == "connect":
            socket.create_connection(("127.0.0.1", canaries.port)).close()
        assert bool(canaries.disturbed()) == (act != "nothing")
    finally:
        canaries.close()


@pytest.mark.parametrize(
    ("idle", "infinities", "finite", "passes"),
    [
        (False, 0, False, True),
        (True, 0, False, False),
        (True, 2, False, True),
        (True, 2, True, False),
    ],
)
def test_a_kernel_is_idle_only_where_no_byte_in_its_place_changes_anything_nor_with_an_infinity(
    monkeypatch: pytest.MonkeyPatch, idle: bool, infinities: int, finite: bool, passes: bool
) -> None:
    """`infinities`: with which of the two inputs that have one it is of use, counted from 1."""
    fills: list[int] = []

    def without(trial: object, sample: object, byte: int, *, skip: int) -> list[torch.Tensor]:
        if skip == 1 and sample is told:
            fills.append(byte)
        changed = skip == 0 or (
            skip == 1 and not idle and len(set(fills)) > 1
        )  # the first byte means what was to be written
        return [torch.tensor(float(changed or (skip == 1 and sample == infinities)))]

    def variants(trial: object, sample: object) -> Iterator[int]:
        yield from (1, 2)

    monkeypatch.setattr(dead_launches, "_run_without", without)
    monkeypatch.setattr(dead_launches, "with_an_infinity", variants)
    monkeypatch.setattr(dead_launches, "count_launches", lambda program: 2)
    told = SimpleNamespace(expected=SimpleNamespace(outputs=[torch.tensor([1.0, 2.0])]))
    trial: Any = SimpleNamespace(
        candidate=candidate(linear_relu()),
        contract=Contract(assume_finite=finite),
        first_two=(told, None),
    )
    (check,) = GHOST.run(trial)
    assert check.passed is passes, check
    assert len(set(fills)) == len(fills) > 1
    told.expected.outputs = [torch.zeros(3), None]
    (check,) = GHOST.run(trial)
    assert check.passed
    assert "one number" in check.detail
