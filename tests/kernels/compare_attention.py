"""The interpreted process of `test_attention`: `python -m tests.kernels.compare_attention`,
TRITON_INTERPRET=1; prints one JSON.

As `compare_products`: the interpreter shows addresses, masks and the online softmax; how exact
products in pieces are, a GPU tells.
"""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fake_gpu import graph_on_a_gpu
from tests.kernels.compare import errors, outputs_of
from tests.kernels.compare_products import normal
from tests.kernels.traced_programs import AtenStep, interpret, trace_program
from torch_cudal1.graph.fusion.partition import rebase_on_inputs
from torch_cudal1.graph.lower import lower
from torch_cudal1.ir.program import Program, Value
from torch_cudal1.kernels import propose

INF, NAN = float("inf"), float("nan")
HALF, BF16 = torch.float16, torch.bfloat16
Case = tuple[Callable[..., Any], tuple[Tensor, ...]]


def _make_fused_step(*, causal: bool = False, scale: float | None = None) -> AtenStep:
    """PyTorch's fused operator for fp32 on CUDA; its result has heads inside rows, as has what the
    reference gives here.
    """

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
        return attended.transpose(1, 2).contiguous().transpose(1, 2)

    args = (Value(0), Value(1), Value(2), None, False, 0.0, causal)
    return AtenStep(
        "aten._scaled_dot_product_efficient_attention.default",
        args,
        4,
        reference,
        (("scale", scale),) if scale else (),
    )


def _make_biased_step(kind: str = "efficient") -> AtenStep:
    """With a bias, which may hide all keys from a row."""

    def reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return (
            attended.transpose(1, 2).contiguous().transpose(1, 2)
            if kind == "efficient"
            else attended.contiguous()
        )

    args = (Value(0), Value(1), Value(2), Value(3), False, 0.0, False)
    return AtenStep(
        f"aten._scaled_dot_product_{kind}_attention.default",
        args,
        4 if kind == "efficient" else 9,
        reference,
    )


def safely(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As PyTorch takes attention apart where it has no fused operator: under a mask, a softmax that
    is 0 in rows without keys.
    """
    scores = torch.bmm(q, k.transpose(1, 2)).view(1, *mask.shape[:1], -1, k.shape[1]) * 0.2
    weights = torch.ops.aten._safe_softmax(scores + mask, -1)
    return torch.bmm(weights.view(-1, *weights.shape[2:]), v)


def _make_step_with_logsumexp(operator: str, *, causal: bool = False) -> AtenStep:
    """As training asks for it: the log-sum-exp of each row is read too."""

    def reference(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(
            scores.new_ones(scores.shape[-2:]).triu(1).bool() & causal, -INF
        )
        top = scores.amax(
            -1, keepdim=True
        )  # an infinite one makes NaN in PyTorch's kernels, but not in its `logsumexp`
        total = ((scores - top).exp().sum(-1, keepdim=True).log() + top).squeeze(-1)
        if operator == "efficient":
            return attended.transpose(1, 2).contiguous().transpose(1, 2), F.pad(
                total, (0, -q.shape[2] % 32), value=INF
            )
        return attended, total.unsqueeze(-1) if operator == "cudnn" else total

    v = (Value(0), Value(1), Value(2))
    args = (*v, 0.0, causal) if operator == "flash" else (*v, None, True, 0.0, causal)
    outs = 4 if operator == "efficient" else 9
    return AtenStep(
        f"aten._scaled_dot_product_{operator}_attention.default", args, outs, reference, read=2
    )


def _make_grouped_query_step(*, causal: bool = False) -> AtenStep:
    """The operator for half types on CUDA, whose keys and values may have fewer heads than the
    queries.
    """

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=True
        ).contiguous()

    return AtenStep(
        "aten._scaled_dot_product_flash_attention.default",
        (Value(0), Value(1), Value(2), 0.0, causal),
        9,
        reference,
    )


def repeat_heads(x: Tensor, count: int) -> Tensor:
    """Keys or values repeated for `count` heads of queries, as Llama does."""
    batch, key_heads, length, size = x.shape
    return (
        x.unsqueeze(2)
        .expand(batch, key_heads, count // key_heads, length, size)
        .reshape(batch, count, length, size)
    )


def attend_with_repeated_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention written out, with keys and values of fewer heads than the queries."""
    return torch.softmax(q @ repeat_heads(k, q.shape[1]).transpose(2, 3) * 0.2, -1) @ repeat_heads(
        v, q.shape[1]
    )


def wide_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """As Hugging Face writes it for half types ("eager"): a softmax in fp32, whose weights are
    rounded for the second product.
    """
    k, v = (repeat_heads(x, q.shape[1]) if x.shape[1] < q.shape[1] else x for x in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    scores = scores if mask is None else scores + mask
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(
        q.dtype
    )
    return torch.matmul(weights, v).transpose(1, 2).clone(memory_format=torch.contiguous_format)


def with_prims(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same with the conversions of a decomposed graph."""
    convert = torch.ops.prims.convert_element_type
    scores = convert(
        torch.bmm(q, k.transpose(1, 2)) * 0.2, torch.promote_types(q.dtype, torch.float32)
    )
    return torch.bmm(convert(scores.softmax(-1), q.dtype), v)


def relu_in_fp32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rounded weights that are no softmax."""
    scores = torch.bmm(q, k.transpose(1, 2)).to(torch.promote_types(q.dtype, torch.float32))
    return torch.bmm(F.relu(scores * 0.1).to(q.dtype), v)


@dataclass(frozen=True)
class OnAGpu:
    """A fusion group as a GPU's process captures it: there the softmax of fp16 itself yields fp32,
    without a conversion before it.
    """

    function: Callable[..., Tensor]

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)

    def program(self, inputs: tuple[Tensor, ...]) -> Program:
        """Its steps, for inputs in this order."""
        lowered = lower(
            graph_on_a_gpu(
                lambda *tensors: self.function(*tensors),
                *(x.shape for x in inputs),
                dtype=inputs[0].dtype,
            )
        )
        specs = lowered.region.program.inputs
        return rebase_on_inputs(
            lowered.region.program,
            lowered.order,
            tuple(specs[lowered.order.index(i)] for i in range(len(specs))),
        )


def attend_as_mingpt(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Causal attention of two heads as minGPT writes it."""
    b, t, c = q.shape
    q, k, v = (part.view(b, t, 2, c // 2).transpose(1, 2) for part in (q, k, v))
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    weights = F.softmax(scores.masked_fill(mask[:, :, :t, :t] == 0, -INF), dim=-1)
    return (weights @ v).transpose(1, 2).contiguous().view(b, t, c)


def with_relu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights that are no softmax."""
    return torch.bmm(F.relu(torch.bmm(q, k.transpose(1, 2)) * 0.1), v)


def attend_with_decay(c: Tensor, b: Tensor, a: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    """What a chunk of a state-space model (Mamba 2) gives to itself. The scores are weighted under
    another order of dimensions.

    c, b: (batch, length, heads, states); a: (batch, heads, length), running sums; x: (batch,
    length, heads, size).
    """
    decay = (a[..., :, None] - a[..., None, :]).masked_fill(mask == 0, -INF)
    scores = torch.einsum("blhn,bshn->blhs", c, b)
    return torch.einsum("blhs,bshp->blhp", scores * decay.exp().permute(0, 2, 1, 3), x)


def attend_with_decay_transposed(
    c: Tensor, b: Tensor, a: Tensor, x: Tensor, mask: Tensor
) -> Tensor:
    """As `attend_with_decay`, contracted as opt_einsum orders it: values by weights, both transposed."""
    batch, length, heads, size = x.shape
    decay = (a[..., :, None] - a[..., None, :]).masked_fill(mask == 0, -INF)
    scores = torch.einsum("blhn,bshn->blhs", c, b) * decay.exp().permute(0, 2, 1, 3)
    weights = scores.permute(0, 2, 3, 1).reshape(batch * heads, length, length)
    return (x.permute(0, 2, 3, 1).reshape(batch * heads, size, length) @ weights).view(
        batch, heads, size, length
    )


def attend_with_decay_inside_rows(
    c: Tensor, b: Tensor, a: Tensor, x: Tensor, mask: Tensor
) -> Tensor:
    return attend_with_decay_transposed(c, b, a, x, mask).permute(0, 3, 1, 2).contiguous()


def softmax_turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The weights on the right; heads in (batch, rows, elements)."""
    return v.transpose(1, 2) @ (q @ k.transpose(1, 2)).softmax(-1).transpose(1, 2)


def _chunk(batch: int, length: int, heads: int, states: int, size: int) -> tuple[Tensor, ...]:
    sums = normal(batch, heads, length).abs().cumsum(-1) * -0.2
    c, b, x = (normal(batch, length, heads, width) for width in (states, states, size))
    return c, b, sums, x, torch.ones(length, length).tril()


def _draw_three(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    stacked = normal(3, *shape)
    return stacked[0].clone(), stacked[1].clone(), stacked[2].clone()


def _draw_grouped(
    batch: int,
    heads: int,
    key_heads: int,
    length: int,
    size: int,
    dtype: torch.dtype = torch.float16,
) -> tuple[Tensor, ...]:
    shapes = (
        (batch, heads, length, size),
        (batch, key_heads, length, size),
        (batch, key_heads, length, size),
    )
    return tuple(normal(*shape).to(dtype) for shape in shapes)


def _causal(length: int, dtype: torch.dtype) -> Tensor:
    """What is added to scores: the lowest number of the type for keys after the query, and for all
    keys of the last query.
    """
    above = torch.ones(length, length).triu(1)
    above[-1] = 1
    return torch.zeros(1, 1, length, length, dtype=dtype).masked_fill(
        above.bool(), torch.finfo(dtype).min
    )


def _padding(batch: int, length: int, dtype: torch.dtype) -> Tensor:
    """Minus infinity for the first keys, more of them than a tile has columns; and for all of the
    last one: there eager has NaN.
    """
    mask = torch.zeros(batch, 1, 1, length, dtype=dtype)
    mask[0, ..., :66] = mask[-1] = -INF
    return mask


def align_rows(bias: Tensor) -> Tensor:
    """The same numbers with rows 8 elements apart or a multiple: what PyTorch's operators want, and
    its own front makes.
    """
    return torch.nn.functional.pad(bias, (0, -bias.shape[-1] % 8))[..., : bias.shape[-1]]


def _draw_bias_with_hidden_keys(
    batch: int, length: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """(batch, 1, rows, columns): numbers, and minus infinity where a key is hidden; for rows 3 and
    the last all of them are.
    """
    bias = align_rows(normal(batch, 1, length, length).to(dtype))
    bias[..., 5] = bias[..., 3, :] = bias[..., -1, :] = -INF
    bias[..., 7, :66] = -INF
    return bias


def _draw_with_specials() -> tuple[Tensor, ...]:
    q, k, v = _draw_three(1, 2, 70, 16)
    q[0, 0, 3, 2], k[0, 1, 5, 1], v[0, 0, 9, 4] = NAN, INF, NAN
    return q, k, v


CASES: dict[str, Case] = {
    "ragged": (_make_fused_step(), _draw_three(2, 3, 70, 24)),
    "exact tiles": (_make_fused_step(), _draw_three(1, 2, 128, 32)),
    "causal": (_make_fused_step(causal=True), _draw_three(1, 2, 130, 32)),
    "log-sum-exp, ragged": (_make_step_with_logsumexp("efficient"), _draw_three(2, 3, 70, 24)),
    "log-sum-exp, padded beyond a tile": (
        _make_step_with_logsumexp("efficient", causal=True),
        _draw_three(1, 2, 130, 32),
    ),
    "log-sum-exp, exact tiles": (
        _make_step_with_logsumexp("efficient"),
        _draw_three(1, 2, 128, 32),
    ),
    "log-sum-exp, NaN and infinity": (
        _make_step_with_logsumexp("efficient"),
        _draw_with_specials(),
    ),
    "log-sum-exp, flash": (
        _make_step_with_logsumexp("flash", causal=True),
        _draw_grouped(2, 3, 3, 70, 24),
    ),
    "log-sum-exp, cudnn": (_make_step_with_logsumexp("cudnn"), _draw_grouped(1, 2, 2, 70, 32)),
    "own scale": (_make_fused_step(scale=0.3), _draw_three(1, 2, 33, 16)),
    "keys of another length": (
        _make_fused_step(),
        (normal(1, 2, 40, 16), normal(1, 2, 90, 16), normal(1, 2, 90, 16) * 2),
    ),
    "heads inside rows": (
        _make_fused_step(),
        tuple(part.transpose(1, 2) for part in _draw_three(2, 70, 3, 16)),
    ),  # type: ignore[dict-item]
    "NaN and infinity": (_make_fused_step(), _draw_with_specials()),
    "written out, causal": (
        attend_as_mingpt,
        (*_draw_three(2, 70, 32), torch.tril(torch.ones(1, 1, 128, 128))),
    ),
    "four heads of queries for one of keys": (
        _make_grouped_query_step(),
        _draw_grouped(2, 8, 2, 70, 40),
    ),
    "two, causal": (_make_grouped_query_step(causal=True), _draw_grouped(2, 4, 2, 130, 24)),
    "one head of keys": (_make_grouped_query_step(), _draw_grouped(1, 3, 1, 33, 16)),
    "keys that are repeated": (
        attend_with_repeated_heads,
        _draw_grouped(2, 6, 3, 70, 24, dtype=torch.float32),
    ),
    "softmax in fp32, bf16": (wide_softmax, _draw_grouped(2, 3, 3, 70, 24, BF16)),
    "softmax in fp32, fp16, exact tiles": (wide_softmax, _draw_grouped(1, 2, 2, 128, 32)),
    "softmax in fp32, fp16 on a GPU": (OnAGpu(wide_softmax), _draw_grouped(2, 3, 3, 70, 24)),
    "softmax in fp32, bf16 on a GPU, causal, keys repeated": (
        OnAGpu(wide_softmax),
        (*_draw_grouped(2, 6, 2, 90, 40, BF16), _causal(90, BF16)),
    ),
    "softmax in fp32, fp16 on a GPU, padding, one head of keys": (
        OnAGpu(wide_softmax),
        (*_draw_grouped(3, 4, 1, 130, 24), _padding(3, 130, HALF)),
    ),
    "softmax in fp32, bf16, padding": (
        wide_softmax,
        (*_draw_grouped(3, 2, 2, 100, 16, BF16), _padding(3, 100, BF16)),
    ),
    "softmax in fp32, fp16, a query without keys": (
        wide_softmax,
        (*_draw_grouped(1, 4, 2, 130, 24), _causal(130, HALF)),
    ),
    "softmax in fp32, decomposed": (
        with_prims,
        tuple(x.flatten(0, 1) for x in _draw_grouped(1, 3, 3, 70, 20, BF16)),
    ),
    "relu in fp32, fp16": (
        relu_in_fp32,
        tuple(x.flatten(0, 1) for x in _draw_grouped(1, 3, 3, 70, 20)),
    ),
    "bias": (_make_biased_step(), (*_draw_three(2, 3, 70, 24), align_rows(normal(2, 3, 70, 70)))),
    "bias, a key for nobody and a query without keys": (
        _make_biased_step(),
        (*_draw_three(2, 3, 70, 24), _draw_bias_with_hidden_keys(2, 70).expand(2, 3, 70, 70)),
    ),
    "bias, fp16": (
        _make_biased_step(),
        (
            *_draw_grouped(1, 2, 2, 70, 32),
            _draw_bias_with_hidden_keys(1, 70, HALF).expand(1, 2, 70, 70),
        ),
    ),
    "bias, cudnn": (
        _make_biased_step("cudnn"),
        (
            *_draw_grouped(1, 2, 2, 64, 32),
            _draw_bias_with_hidden_keys(1, 64, HALF).expand(1, 2, 64, 64),
        ),
    ),
    "safe softmax": (safely, (*_draw_three(3, 70, 20), _draw_bias_with_hidden_keys(3, 70)[:, 0])),
    "relu": (with_relu, _draw_three(3, 70, 20)),
    "decays": (attend_with_decay, _chunk(2, 64, 3, 16, 40)),
    "decays, ragged": (attend_with_decay, _chunk(2, 70, 3, 20, 16)),
    "decays, weights on the right": (attend_with_decay_transposed, _chunk(2, 70, 3, 20, 40)),
    "decays, weights on the right, heads inside rows": (
        attend_with_decay_inside_rows,
        _chunk(2, 70, 3, 20, 16),
    ),
    "softmax, weights on the right": (
        softmax_turned,
        (*_draw_three(3, 70, 20)[:2], normal(3, 70, 33)),
    ),
    "epilogue": (
        lambda q, k, v, r: with_relu(q, k, v) * 0.5 + r,
        (*_draw_three(3, 70, 20), normal(3, 70, 20)),
    ),
}


def program_of(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Program:
    """The Program of a case."""
    return (
        function.program(inputs)
        if isinstance(function, OnAGpu)
        else trace_program(function, inputs)
    )


CUT_OFF = "positive terms, cut off by tensor cores"
_TENSOR_CORES = """
@triton.jit
def cut_off(x):
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def cut_dot(a, b, input_precision: tl.constexpr):
    return tl.dot(cut_off(a), cut_off(b), input_precision="ieee")


@triton.jit
def SYMBOL("""


def _cut_off(tensor: Tensor) -> Tensor:
    return (tensor.contiguous().view(torch.int32) & -8192).view(torch.float32)


def _nearest(tensor: Tensor) -> Tensor:
    return _cut_off((tensor.contiguous().view(torch.int32) + 4096).view(torch.float32))


def _in_tf32(read: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`with_relu` in products whose operands are read so, summed without error."""
    scores = read(q).double() @ read(k).double().transpose(1, 2) * 0.1
    return read(scores.float().relu()).double() @ read(v).double()


def _cut_off_facts() -> list[dict[str, Any]]:
    """Of plain TF32 kernels, with what tensor cores do to their operands: root mean square errors
    beside those of operands that are rounded to the nearest, and cut off.
    """
    inputs = tuple(tensor.abs() for tensor in _draw_three(2, 65, 32))
    program, exact = (
        program_of(with_relu, inputs),
        with_relu(*(tensor.double() for tensor in inputs)),
    )
    facts = []
    for proposal in propose(program, 90, ["matmul"]):
        if proposal.config["method"] != "tf32":
            continue

        def cut_products(text: str) -> str:
            head, _, kernel = text.rpartition("\n@triton.jit\ndef ")
            symbol, _, body = kernel.partition("(")
            return (
                head + _TENSOR_CORES.replace("SYMBOL", symbol) + body.replace("tl.dot(", "cut_dot(")
            )

        (got,) = interpret(program, proposal, inputs, cut_products)
        assert got is not None
        ways = {
            "error": got,
            "nearest": _in_tf32(_nearest, *inputs),
            "cut off": _in_tf32(_cut_off, *inputs),
        }
        facts.append(
            {
                name: float((output.double() - exact).square().mean().sqrt())
                for name, output in ways.items()
            }
        )
    return facts


def main(names: Sequence[str]) -> None:
    """Compare the named cases and print the facts."""
    warnings.simplefilter("ignore")
    facts: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        if name == CUT_OFF:
            facts[name] = _cut_off_facts()
            continue
        function, inputs = CASES[name]
        eager, exact = (
            outputs_of(function, inputs),
            outputs_of(function, [t.double() for t in inputs]),
        )
        program = program_of(function, inputs)
        facts[name] = []
        for proposal in propose(program, 90)[::3]:
            outputs = interpret(
                program,
                proposal,
                inputs,
                lambda text: re.sub(r', input_precision="\w+"', ', input_precision="ieee"', text),
            )
            for output, eager_output, exact_output in zip(outputs, eager, exact, strict=True):
                assert output is not None
                facts[name].append(
                    {"config": dict(proposal.config), **errors(output, eager_output, exact_output)}
                )
    print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1:])
