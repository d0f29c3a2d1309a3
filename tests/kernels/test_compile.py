"""`build` compiles without a GPU and yields Programs that fit the reference, the checks and the
cubin's own parameter list.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.traced_programs import trace_program
from torch_cudal1.api.special import log_bessel_i, log_bessel_k
from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.device.cuda.cubin import check_launch, inspect_cubin
from torch_cudal1.device.specs import max_shared_bytes
from torch_cudal1.ir.check import check_program
from torch_cudal1.ir.program import Alloc, Aten, Launch, Program, TensorSpec, Value
from torch_cudal1.kernels import Proposal, build, propose
from torch_cudal1.kernels.codegen.compile import _check_resources, drop_dead_globals
from torch_cudal1.kernels.lowering import lower
from torch_cudal1.kernels.ops import activations
from torch_cudal1.kernels.ops.pointwise import FLOAT_UNARY

X, W, X4, W6 = torch.rand(64, 1000), torch.rand(1000), torch.rand(4, 6, 20, 20), torch.rand(6)


def four_bits(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    bits = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    return F.gelu(x @ ((bits.to(x.dtype) - 8) * scales).t())


def eight_bits(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return x @ (weight.to(x.dtype) * scales).t()


# family and variety -> (function, inputs)
FUNCTIONS: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
    "softmax": (lambda x: (x * 0.5).softmax(-1), (X.half(),)),
    "log_softmax, rows not contiguous": (lambda x: x.log_softmax(1), (X4,)),
    "layer norm with statistics": (
        lambda x, w: torch.ops.aten.native_layer_norm(x, [1000], w, w, 1e-5),
        (X, W),
    ),
    "group norm": (lambda x, w: F.gelu(F.group_norm(x, 3, w, w)), (X4.bfloat16(), W6.bfloat16())),
    "argmax": (lambda x: x.argmax(-1), (X,)),
    "split sum": (lambda x: x.sum(), (torch.empty(1 << 20),)),
    "long rows in a loop": (lambda x: x.softmax(-1), (torch.empty(200, 70000),)),
    "exclusive sums": (
        lambda x: torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1].cumsum(1)), 1),
        (X,),
    ),
    "reversed sums in a loop": (lambda x: x.flip(1).cumsum(1).flip(1), (torch.empty(200, 70000),)),
    "cross entropy": (F.cross_entropy, (X, torch.zeros(64, dtype=torch.int64))),
    "max pool": (
        lambda x: torch.ops.aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])[0],
        (X4,),
    ),
    "moments in one pass": (lambda x: F.layer_norm(x, (70000,)), (torch.empty(200, 70000),)),
    "weights of four bits": (
        four_bits,
        (X[:1].half(), torch.zeros(48, 500, dtype=torch.uint8), torch.empty(48, 1).half()),
    ),
    "weights of four bits, many rows": (
        four_bits,
        (X[:40].bfloat16(), torch.zeros(48, 500, dtype=torch.uint8), torch.rand(48, 1).bfloat16()),
    ),
    "weights of eight bits, many rows": (
        eight_bits,
        (X[:64].half(), torch.zeros(48, 1000).to(torch.float8_e4m3fn), torch.rand(48, 1).half()),
    ),
    "weights of eight bits, e4m3": (
        eight_bits,
        (X[:2].half(), torch.zeros(48, 1000).to(torch.float8_e4m3fn), torch.empty(48, 1).half()),
    ),
    "weights of eight bits, e5m2": (
        eight_bits,
        (
            X[:1].bfloat16(),
            torch.zeros(48, 1000).to(torch.float8_e5m2),
            torch.empty(48, 1).bfloat16(),
        ),
    ),
    "logarithms of Bessel functions": (
        lambda x, w: log_bessel_i(w, x) - log_bessel_k(w, x),
        (X[:4], W),
    ),
    "element-wise": (
        lambda x, w: (F.silu(x) * w, x > 0, F.gelu(x, approximate="tanh"), torch.erf(x).exp()),
        (X, W),
    ),
}
SMS = (80, 86, 89, 90, 100, 120)


def launches(program: Program) -> list[Launch]:
    return [step for step in program.steps if isinstance(step, Launch)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_program_fits_the_reference_and_its_own_machine_code(name: str) -> None:
    reference = trace_program(*FUNCTIONS[name])
    built = build(reference, propose(reference, 90)[0], 90)
    check_program(built)
    assert built.inputs == reference.inputs
    assert len(built.outputs) == len(reference.outputs)
    for launch in launches(built):
        body = bytes(built.payloads[launch.payload].numpy())
        assert hashlib.sha256(body).hexdigest() == launch.payload
        check_launch(
            inspect_cubin(body), launch, 90
        )  # symbol, parameter count and sizes, block, architecture
        assert launch.aligned == tuple(
            arg.value.index for arg in launch.args if isinstance(arg.value, Value)
        )
        assert [arg.kind for arg in launch.args[-2:]] == ["null", "null"]
    assert set(built.payloads) == {launch.payload for launch in launches(built)}


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize(
    "name",
    [
        "softmax",
        "layer norm with statistics",
        "argmax",
        "element-wise",
        "exclusive sums",
        "cross entropy",
        "max pool",
        "weights of four bits",
        "weights of four bits, many rows",
    ],
)
def test_each_family_compiles_for_each_architecture(name: str, sm: int) -> None:
    reference = trace_program(*FUNCTIONS[name])
    built = build(reference, propose(reference, sm)[-1], sm)
    for launch in launches(built):
        check_launch(inspect_cubin(bytes(built.payloads[launch.payload].numpy())), launch, sm)
        assert launch.shared_bytes <= max_shared_bytes(sm)


def test_output_specs_are_exactly_those_of_eager() -> None:
    last = torch.empty(2, 6, 4, 5).to(memory_format=torch.channels_last)
    for function, inputs in (
        *FUNCTIONS.values(),
        (lambda a: F.relu(a) + 1, (last,)),
        (lambda a: a.t() * 2, (X,)),
    ):
        reference = trace_program(function, inputs)
        proposal = propose(reference, 90)[0]
        eager = function(*inputs) if sum(t.numel() for t in inputs) < 1e6 else None
        written = lower(reference, proposal).written
        if eager is not None:
            tensors = eager if isinstance(eager, tuple) else (eager,)
            want = [replace(TensorSpec.of(t), device="cuda") for t in tensors]
            assert [written[v] for v in reference.outputs if v is not None] == want


def test_every_output_has_one_alloc_and_unneeded_ones_have_none() -> None:
    reference = trace_program(*FUNCTIONS["layer norm with statistics"])
    all_outputs = build(reference, propose(reference, 90)[0], 90)
    assert sum(isinstance(step, Alloc) for step in all_outputs.steps) == 3
    only = replace(reference, outputs=(reference.outputs[0],))
    assert sum(isinstance(step, Alloc) for step in build(only, propose(only, 90)[0], 90).steps) == 1


def test_building_twice_gives_the_same_bytes_and_leaves_the_environment_alone() -> None:
    reference = trace_program(*FUNCTIONS["softmax"])
    before = dict(os.environ)
    first, second = (build(reference, propose(reference, 90)[0], 90) for _ in range(2))
    assert first.digest == second.digest
    assert dict(os.environ) == before
    for body in first.payloads.values():
        assert b"/tmp" not in bytes(
            body.numpy()
        )  # no path of the building machine travels with the cubin


def test_a_constant_of_the_reference_stays_a_payload() -> None:
    reference = trace_program(lambda x, w: x * w, (X, W))
    with_constant = replace(
        reference, inputs=reference.inputs[:1], constants=("w",), payloads={"w": torch.ones(1000)}
    )
    built = build(with_constant, propose(with_constant, 90)[0], 90)
    assert built.constants == ("w",)
    assert torch.equal(built.payloads["w"], torch.ones(1000))


def test_a_tensor_of_more_than_2_31_elements_is_addressed_with_64_bits() -> None:
    large = TensorSpec("float16", (3, 2**30), (2**30, 1), "cuda")
    reference = Program((large,), (Aten("aten.relu.default", (Value(0),), (), (1,)),), (1,))
    for proposal in propose(reference, 90):
        assert "tl.program_id(0).to(tl.int64)" in lower(reference, proposal).kernels[0].text
    small = replace(reference, inputs=(TensorSpec("float16", (3, 2**20), (2**20, 1), "cuda"),))
    assert "int64" not in lower(small, propose(small, 90)[0]).kernels[0].text


@pytest.mark.parametrize(
    ("family", "config", "word"),
    [
        ("norm", {"rows": 1, "columns": 1024, "warps": 4}, "family"),
        ("softmax", {"rows": 1, "columns": 512, "warps": 4}, "do not fit"),
        ("softmax", {"rows": 3, "columns": 1024, "warps": 4}, "powers of two"),
        ("softmax", {"rows": 1, "columns": 0, "warps": 4}, "element-wise|reduction"),
        ("softmax", {"rows": 1024, "columns": 1024, "warps": 4}, "tile"),
        ("softmax", {"rows": 1, "columns": 1024, "warps": 5}, "warps"),
        ("softmax", {"rows": 1, "columns": 1024, "warps": "many"}, "number"),
        ("softmax", {"rows": 1, "columns": 2048, "warps": 4, "split": 7}, "pieces"),
    ],
)
def test_a_nonsense_proposal_is_refused_by_name(
    family: str, config: dict[str, int | str | bool], word: str
) -> None:
    with pytest.raises(ProgramError, match=word):
        lower(trace_program(*FUNCTIONS["softmax"]), Proposal(family, config))


def test_every_unary_function_compiles_to_code_without_module_memory() -> None:
    """The scan refuses a cubin with module memory; libdevice leaves a dead string in each, which
    `build` drops.
    """
    table = FLOAT_UNARY | activations.FLOAT_UNARY
    names = [name for name in table if hasattr(torch.ops.aten, name)]
    reference = trace_program(
        lambda x: tuple(getattr(torch.ops.aten, name)(x) for name in names), (X,)
    )
    built = build(reference, propose(reference, 90)[0], 90)
    (launch,) = launches(built)
    check_launch(inspect_cubin(bytes(built.payloads[launch.payload].numpy())), launch, 90)
    assert len(built.outputs) == len(names) > 20


def test_only_globals_that_nothing_reads_are_dropped() -> None:
    dead = ".global .align 1 .b8 _$_str[11] = {95, 95};\n"
    table = ".global .align 4 .b8 table[24] = {65, 144};\n"
    code = "mov.u64 %rd1, table;\n"
    assert drop_dead_globals(dead + table + code) == table + code


def test_what_no_device_can_run_is_refused() -> None:
    """The compiler accepts any shared memory and emits `trap` for impossible bodies: both stop
    here.
    """

    class Metadata:
        name, shared, num_warps, num_ctas, global_scratch_size, profile_scratch_size = (
            "k",
            0,
            4,
            1,
            0,
            0,
        )

    class Compiled:
        metadata, asm = Metadata(), {"ptx": "st.global.b32", "cubin": b"code"}

    assert _check_resources(Compiled, "k", 90).warps == 4
    Compiled.metadata.shared = 150_000
    assert _check_resources(Compiled, "k", 90).shared_bytes == 150_000
    with pytest.raises(NotLowerableError, match="shared memory"):
        _check_resources(Compiled, "k", 86)
    Compiled.metadata.shared, Compiled.asm = 0, {"ptx": "trap;", "cubin": b"code"}
    with pytest.raises(NotLowerableError, match="stores nothing"):
        _check_resources(Compiled, "k", 90)
