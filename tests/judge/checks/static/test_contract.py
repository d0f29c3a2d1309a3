"""What can be refused without running anything is refused, with the rule in the detail; the honest
twin beside it passes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.judge.programs import OUT, V, candidate, linear_relu, op, spec, with_steps
from torch_cudal1.core.errors import ProgramError
from torch_cudal1.ir.aten import overload
from torch_cudal1.ir.program import Alloc, Call, Launch, LaunchArg, Program, TensorSpec
from torch_cudal1.ir.records import CheckResult, Region
from torch_cudal1.judge.checks.static.allowed_operators import is_allowed
from torch_cudal1.judge.checks.static.contract import check_source_contract, contract
from torch_cudal1.judge.checks.static.source_syntax import SOURCE_BYTES
from torch_cudal1.judge.reference.source_reference import SourceCandidate

CPU = torch.device("cpu")
REGION = linear_relu()
REFERENCE = REGION.program
TRANSPOSE, ADDMM, RELU = REFERENCE.steps
CODE = torch.zeros(8, dtype=torch.uint8)
TABLE = torch.arange(8, dtype=torch.float32)
GPU_INPUT = TensorSpec("float32", (8, 8), (8, 1), "cuda")
ON_GPU = Region(Program((GPU_INPUT,), (op("aten.mul.Tensor", V(0), 2.0, out=1),), (1,)), ("input",))
WITH_TABLE = Region(
    Program(
        (spec(8),), (op("aten.add.Tensor", V(0), V(1), out=2),), (2,), ("table",), {"table": TABLE}
    ),
    ("input",),
)
VIEW = Region(
    Program((spec(8, 8),), (op("aten.view.default", V(0), (64,), out=1),), (1,)), ("input",)
)


def launch_twice(
    out: TensorSpec = GPU_INPUT, *after: object, output: int = 1, writes: int = 1
) -> Program:
    launch = Launch(
        "code", "twice", (1, 1, 1), 64, 0, (LaunchArg("ptr", V(0)), LaunchArg("ptr", V(writes)))
    )
    return Program(
        (GPU_INPUT,), (Alloc(1, out), launch, *after), (output,), payloads={"code": CODE}
    )  # type: ignore[arg-type]


def get_first_check(checks: list[CheckResult]) -> CheckResult:
    """The check of the plan or text itself; `cubin_scan` or `triage` may follow."""
    assert checks[0].name == "contract"
    return checks[0]


def check_contract(program: Program, region: Region) -> CheckResult:
    return get_first_check(contract(region, candidate(program)))


def return_a_constant() -> Program:
    stored = torch.relu(torch.randn(32, OUT))
    return Program(
        REFERENCE.inputs,
        (op("aten.clone.default", V(3), out=4),),
        (4,),
        ("stored",),
        {"stored": stored},
    )


def hide_in_a_nested_program() -> Program:
    return Program(REFERENCE.inputs, (Call(return_a_constant(), (0, 1, 2), (3,)),), (3,))


def change_table() -> Program:
    return replace(WITH_TABLE.program, payloads={"table": TABLE + 1})


def return_table() -> Program:
    steps = (op("aten.add.Tensor", V(0), V(1), out=2), op("aten.view.default", V(1), (8,), out=3))
    return replace(WITH_TABLE.program, steps=steps, outputs=(3,))


def never_written() -> Program:
    spare = Alloc(2, GPU_INPUT)
    return launch_twice(GPU_INPUT, spare, output=2)


def read_before_writing() -> Program:
    steps = (Alloc(1, GPU_INPUT), op("aten.add.Tensor", V(0), V(1), out=2))
    return Program((GPU_INPUT,), steps, (2,))


def nest_programs(depth: int) -> Program:
    program = REFERENCE
    for _ in range(depth):
        program = Program(REFERENCE.inputs, (Call(program, (0, 1, 2), (3,)),), (3,))
    return program


ATTACKS: dict[str, tuple[Callable[[], Program], Region, str]] = {
    "a stored result": (return_a_constant, REGION, "no rule"),
    "a stored result in a nested Program": (hide_in_a_nested_program, REGION, "no rule"),
    "the reference's constant, changed": (change_table, WITH_TABLE, "no rule"),
    "memory of a constant as output": (return_table, WITH_TABLE, "outlives the call"),
    "a constant nobody reads": (
        lambda: replace(WITH_TABLE.program, steps=(op("aten.mul.Tensor", V(0), 2.0, out=2),)),
        WITH_TABLE,
        "read by nothing",
    ),
    "a payload nobody uses": (
        lambda: REFERENCE.with_constant("spare", TABLE),
        REGION,
        "used by nothing",
    ),
    "an input as output": (
        lambda: Program((spec(8),), (), (0,)),
        Region(WITH_TABLE.program, ("input",)),
        "memory of input 0",
    ),
    "one tensor for two outputs": (
        lambda: with_steps(REGION, TRANSPOSE, ADDMM, RELU, output=5),
        replace(REGION, program=replace(REFERENCE, outputs=(5, 4))),
        "are not the region's",
    ),
    "memory that nothing writes": (never_written, ON_GPU, "nothing has written it"),
    "memory read before it is written": (read_before_writing, ON_GPU, "nothing has written"),
    "uninitialised memory by operator": (
        lambda: with_steps(
            REGION, TRANSPOSE, ADDMM, op("aten.empty_like.default", V(4), out=5), output=5
        ),
        REGION,
        "list of operators",
    ),
    "an operator that reads a file": (
        lambda: with_steps(REGION, op("aten.from_file.default", "/etc/passwd", out=3), output=3),
        REGION,
        "list of operators",
    ),
    "an allocation of other strides": (
        lambda: launch_twice(replace(GPU_INPUT, strides=(1, 8))),
        ON_GPU,
        "allocated with strides",
    ),
    "an allocation of another dtype": (
        lambda: launch_twice(replace(GPU_INPUT, dtype="float16")),
        ON_GPU,
        "expected float32",
    ),
    "an allocation on the host": (
        lambda: launch_twice(
            GPU_INPUT,
            Alloc(2, replace(GPU_INPUT, device="cpu")),
            op("aten.mul.Tensor", V(2), 2.0, out=3),
            output=3,
        ),
        ON_GPU,
        "nothing has written",
    ),
    "Programs in Programs without end": (lambda: nest_programs(20), REGION, "nested more than"),
    "two million arguments": (
        lambda: Program(
            (GPU_INPUT,),
            (
                Alloc(1, GPU_INPUT),
                Launch("code", "k", (1, 1, 1), 64, 0, (LaunchArg("ptr", V(1)),) * 2_000),
            ),
            (1,),
            payloads={"code": CODE},
        ),
        ON_GPU,
        "arguments, at most",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_what_breaks_the_contract_is_refused(name: str) -> None:
    make, region, word = ATTACKS[name]
    check = check_contract(make(), region)
    assert not check.passed
    assert word in check.detail, check.detail


HONEST: dict[str, tuple[Callable[[], Program], Region]] = {
    "the reference itself": (lambda: REFERENCE, REGION),
    "the reference's constant": (lambda: WITH_TABLE.program, WITH_TABLE),
    "its constant under another name": (
        lambda: replace(
            WITH_TABLE.program, constants=("other",), payloads={"other": TABLE.clone()}
        ),
        WITH_TABLE,
    ),
    "a view that eager returns too": (
        lambda: Program(
            VIEW.program.inputs, (op("aten.reshape.default", V(0), (64,), out=1),), (1,)
        ),
        VIEW,
    ),
    "a kernel into fresh memory": (launch_twice, ON_GPU),
    "a kernel, then operators": (
        lambda: launch_twice(GPU_INPUT, op("aten.add.Tensor", V(1), 1.0, out=2), output=2),
        ON_GPU,
    ),
    "strides of dimensions of length one": (
        lambda: Program(
            (replace(GPU_INPUT, shape=(1, 8), strides=(8, 1)),),
            (
                Alloc(1, TensorSpec("float32", (1, 8), (1, 1), "cuda")),
                Launch("code", "k", (1, 1, 1), 64, 0, (LaunchArg("ptr", V(1)),)),
            ),
            (1,),
            payloads={"code": CODE},
        ),
        replace(
            ON_GPU,
            program=replace(
                ON_GPU.program, inputs=(replace(GPU_INPUT, shape=(1, 8), strides=(8, 1)),)
            ),
        ),
    ),
    "a nested Program": (lambda: nest_programs(1), REGION),
}


@pytest.mark.parametrize("name", HONEST)
def test_the_honest_twin_passes(name: str) -> None:
    make, region = HONEST[name]
    check = check_contract(make(), region)
    assert check.passed, check.detail
    assert check.value is not None


def test_machine_code_is_scanned_with_the_plan() -> None:
    plan, code = contract(ON_GPU, candidate(launch_twice()))
    assert plan.passed
    assert (code.name, code.passed) == ("cubin_scan", False)  # a payload of zeros is no cubin
    assert len(contract(REGION, candidate(REFERENCE))) == 1


def test_the_references_own_operator_is_allowed_whatever_the_list_says() -> None:
    odd = Region(
        Program((spec(8, 8),), (op("aten.linalg_matrix_exp.default", V(0), out=1),), (1,)),
        ("input",),
    )
    assert not is_allowed("aten.linalg_matrix_exp.default")
    assert check_contract(odd.program, odd).passed


def test_every_operator_on_the_list_exists_and_is_needed_there() -> None:
    listed = importlib.import_module(
        "torch_cudal1.judge.checks.static.allowed_operators"
    )._ALSO_ALLOWED
    for name in listed:
        try:
            operator = overload(name)
        except ProgramError:
            pytest.fail(f"torch {torch.__version__} has no {name}")
        assert not operator._schema.is_mutable, name
        assert not {torch.Tag.core, torch.Tag.pointwise} & set(operator.tags), (
            f"{name} is allowed by its tag"
        )


SOURCE = """
import torch

class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x
"""

SOURCES = {
    "as it should be": (SOURCE, True, "defines ModelNew"),
    "with inputs of its own": (
        SOURCE + "\ndef get_inputs():\n    return []\n",
        True,
        "get_inputs ignored",
    ),
    "the entry as another name": (
        SOURCE.replace("ModelNew", "Fast") + "\nModelNew = Fast\n",
        True,
        "defines",
    ),
    "the entry behind a test": (
        "try:\n    import triton\nexcept ImportError:\n    pass\nif True:\n    class ModelNew: ...\n",
        True,
        "",
    ),
    "no entry": (SOURCE.replace("ModelNew", "Other"), False, "defines no 'ModelNew'"),
    "an entry inside a function": (
        "def make():\n    class ModelNew: ...\n",
        False,
        "defines no 'ModelNew'",
    ),
    "no Python": ("class ModelNew(", False, "does not parse"),
    "a zero byte": ("ModelNew = 1\0", False, "does not parse"),
    "nested without end": ("ModelNew = " + "-" * 100_000 + "1", False, "does not parse"),
    "a chain without end": ("ModelNew = a" + ".a" * 100_000, False, "does not parse"),
    "too long": ("#" * (SOURCE_BYTES + 1), False, "characters, at most"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_is_read_and_not_run(name: str) -> None:
    text, passes, word = SOURCES[name]
    check = get_first_check(check_source_contract(SourceCandidate(text)))
    assert check.passed == passes, check.detail
    assert word in check.detail


def test_a_source_that_passes_is_looked_at_more_closely() -> None:
    plain, streams = (
        check_source_contract(SourceCandidate(SOURCE + more))
        for more in ("", "\ns = torch.cuda.Stream()\n")
    )
    assert [check.name for check in plain] == ["contract", "triage"]
    assert plain[1].value == 0.0
    assert streams[1].passed
    assert "streams" in streams[1].detail
