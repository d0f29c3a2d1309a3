"""Attention in one kernel: scores of a tile of rows against all keys, weighted values summed on the
way, nothing of it in memory.

    out[m] = sum_n weight(scores[m, n]) value[n],   scores = epilogue(query key^T)

`epilogue` is any chain of element-wise steps (scale, bias, mask); `weight` is softmax, computed online,
or another such chain (relu). The products are `gemm`'s: of fp32 in pieces that keep fp32's accuracy
("bf16x6", "tf32x3"), in TF32 only where the user allows it, of half types as they are. There scores
stay in fp32 up to the weights, which the second product takes in the values' type: a model that
takes its softmax in fp32 and rounds the weights is computed so, and its scores are not rounded on
the way. Products of two types are refused. Bytes moved: one read of query, keys and values per band
of rows, which the L2 serves, and one write.

The log-sum-exp of each row, which a backward reads, is a second result where a fused operator
yields it.

Source: Dao, Fu, Ermon, Rudra, Ré, FlashAttention (2022); Milakov, Gimelshein (2018) for the online
softmax.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.codegen.loop_nest import build_epilogue_nest
from torch_cudal1.kernels.codegen.prelude import POINTERS
from torch_cudal1.kernels.expr.affine import AtomSplit, Index, flatten, row_major
from torch_cudal1.kernels.expr.from_program import Output, TracedProgram
from torch_cudal1.kernels.expr.nodes import (
    Dot,
    LogSumExp,
    Map,
    Node,
    Softmax,
    View,
    choose_variants,
    find_nodes,
    reshape,
    rounding_template,
    sources,
    substitute,
)
from torch_cudal1.kernels.ops.attention_ops import HANDLERS, is_attention
from torch_cudal1.kernels.ops.matmul import Sizes, index_of_sizes, split_sizes
from torch_cudal1.kernels.proposal import KernelSource, Proposal
from torch_cudal1.kernels.template import (
    FusionRules,
    LoweredKernels,
    ProposalRequest,
    Template,
    TemplateInput,
    keep_lowerable,
    target_names,
)
from torch_cudal1.kernels.templates.attention_kernel import (
    HALVES,
    AttentionParts,
    print_attention_kernel,
)

__all__ = ["MAX_HEAD_ELEMENTS", "TEMPLATE"]

# Of query and value: their tiles stay in registers.
MAX_HEAD_ELEMENTS = 128
# rows, columns, warps, stages; best guess first
_TILES = ((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2), (64, 32, 4, 3))


def _propose(workload: TemplateInput, request: ProposalRequest) -> tuple[Proposal, ...]:
    traced = workload.trace
    attention = _read_attention(traced, 1 + max(traced.leaves))
    dtype, height = attention.first.left.dtype, attention.first.shape[1]
    methods = (
        ("half",)
        if dtype in HALVES
        else (("tf32",) if "matmul" in request.tf32_ops else ()) + ("tf32x3", "bf16x6")
    )
    configs = [(method, *tile) for tile in _TILES for method in methods]
    names = ("method", "rows", "columns", "warps", "stages")
    # A tile twice as high as the queries is mostly empty. The sort is stable: the table's order
    # stays.
    configs.sort(key=lambda config: config[1] >= 2 * height)
    proposals = (
        Proposal("attention", dict(zip(names, config, strict=True)))
        for config in configs[: request.limit]
    )
    return keep_lowerable(_lower, workload, proposals)


def _lower(workload: TemplateInput, proposal: Proposal) -> LoweredKernels:
    specs = dict(workload.trace.leaves) | workload.output_specs
    kernel = _lower_attention(workload.trace, proposal, specs, workload.program.value_count)
    return LoweredKernels((kernel,), workload.output_specs)


def _lower_attention(
    traced: TracedProgram, proposal: Proposal, specs: Mapping[int, TensorSpec], free: int
) -> KernelSource:
    """The kernel of a proposal; `free` is a value number that nothing has.

    Raises NotLowerableError when the fusion group is no attention, ProgramError when the proposal is
    nonsense.
    """
    parts = _read_attention(traced, free)
    rows, columns, warps, stages = (
        proposal.number(name, 0) for name in ("rows", "columns", "warps", "stages")
    )
    method = proposal.config.get("method")
    allowed = ("half",) if parts.first.left.dtype in HALVES else ("tf32", "tf32x3", "bf16x6")
    if (rows, columns, warps, stages) not in _TILES or method not in allowed:
        raise ProgramError(
            "proposal", f"{dict(proposal.config)}: none of the tiles {_TILES} with one of {allowed}"
        )
    text, values = print_attention_kernel(parts, str(method), rows, columns)
    symbol = f"attention_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    arguments = tuple((value, POINTERS[specs[value].torch_dtype]) for value in values)
    batch, height = parts.first.shape[:2]
    return KernelSource(
        symbol,
        text.replace("SYMBOL", symbol),
        arguments,
        batch * math.ceil(height / rows),
        warps,
        stages,
    )


def _read_attention(traced: TracedProgram, free: int) -> AttentionParts:
    output, total = _split_results(traced.outputs)
    (node,) = choose_variants((output.node,), online=False)
    second, node = _put_weights_left(_find_dot(node), node)
    weights = _find_weights(second.left, second.shape[0], second.left.shape)
    softmax = isinstance(weights, Softmax)
    # The online softmax divides by the sum at the very end: steps between it and the second product
    # would see weights that are not divided yet.
    if not softmax and find_nodes(Softmax, (weights,)):
        raise NotLowerableError(
            "a softmax that is computed on, or rounded to another type, before it meets the values"
        )
    scores = weights.scores if isinstance(weights, Softmax) else weights
    first = _find_dot(scores)
    # `tl.dot` takes two operands of one type: fp32 scores were once given to a product with half
    # values.
    if first.left.dtype != second.right.dtype:
        raise NotLowerableError(
            f"a product of {first.left.dtype} for the scores and of {second.right.dtype} with the values"
        )
    if (
        len(first.shape) != 3
        or math.prod(first.shape) != math.prod(scores.shape)
        or first.shape[:2] != second.shape[:2]
    ):
        raise NotLowerableError("scores of another shape than the first product")
    if max(first.left.shape[-1], second.shape[-1]) > MAX_HEAD_ELEMENTS:
        raise NotLowerableError(f"queries or values of more than {MAX_HEAD_ELEMENTS} elements")
    # Scores are computed in fp32, whatever the operands are, and not rounded on the way.
    spec = TensorSpec("float32", first.shape, row_major(first.shape), "cuda")
    nest = build_epilogue_nest((Output(free, reshape(scores, first.shape), spec),), first)
    result = build_epilogue_nest((replace(output, node=node),), second)
    causal, safe = (
        (weights.causal, weights.safe) if isinstance(weights, Softmax) else (False, False)
    )
    return AttentionParts(first, second, nest, result, softmax, causal, safe, total)


def _put_weights_left(second: Dot, node: Node) -> tuple[Dot, Node]:
    """The second product with the weights on its left, and `node` made of it: contractions of
    einsum may have it the other way.
    """
    if (
        len(second.shape) != 3
        or find_nodes(Dot, (second.left,))
        or not find_nodes(Dot, (second.right,))
    ):
        return second, node
    batch, rows, columns = second.shape
    # opt_einsum, where it is installed, contracts values with weights, both transposed (state-space
    # chunks, KernelBench 3/48).
    turned = Dot(
        (batch, columns, rows),
        second.dtype,
        _transpose_matrices(second.right),
        _transpose_matrices(second.left),
    )
    return turned, substitute(node, {second: _transpose_matrices(turned)})


def _transpose_matrices(node: Node) -> Node:
    """Each matrix transposed."""
    batch, rows, columns = node.shape
    return View(
        (batch, columns, rows), node.dtype, node, lambda index: (index[0], index[2], index[1])
    )


def _split_results(outputs: tuple[Output, ...]) -> tuple[Output, Output | None]:
    """The weighted values, and the log-sum-exp where that is a result too."""
    totals = [output for output in outputs if isinstance(output.node, LogSumExp)]
    rest = [output for output in outputs if output not in totals]
    if len(rest) != 1 or len(totals) > 1:
        raise NotLowerableError("attention with several results")
    # `_print_logsumexp` addresses rows as neighbours.
    if totals and totals[0].spec.strides != row_major(totals[0].spec.shape):
        raise NotLowerableError(f"a log-sum-exp with strides {totals[0].spec.strides}")
    return rest[0], totals[0] if totals else None


def _find_dot(node: Node) -> Dot:
    """The product that an expression is made of, through element-wise steps and views."""
    stack, dots = [node], dict[Dot, None]()
    while stack:
        current = stack.pop()
        if isinstance(current, Dot):
            dots[current] = None
        elif isinstance(current, (Map, View)):
            stack += current.args if isinstance(current, Map) else (current.source,)
    if len(dots) != 1:
        raise NotLowerableError(f"{len(dots)} products where attention has one")
    return next(iter(dots))


def _find_weights(node: Node, batch: int, shape: tuple[int, ...]) -> Node:
    """The softmax below `node`, where views between them keep all elements in their order; `node`
    itself where it is no softmax. Raises NotLowerableError where the weights are permuted.
    """
    below = node
    while isinstance(below, View) or _passes_through(below, node.dtype):
        (below,) = sources(below)
    if not isinstance(below, Softmax):
        return node
    sizes: Sizes = ((batch,), (shape[-2],), (shape[-1],))
    # Each reshape that cuts a dimension raises once; with the finer sizes the walk starts over.
    for _ in range(4):
        index: Index = index_of_sizes(sizes)
        below = node
        try:
            while isinstance(below, View) or _passes_through(below, node.dtype):
                index = below.remap(index) if isinstance(below, View) else index
                (below,) = sources(below)
            expected = flatten(index_of_sizes(sizes), row_major(shape))
            # Permuted weights would meet other values than the product multiplies them with.
            if flatten(index, row_major(below.shape)) != expected:
                raise NotLowerableError("weights that are permuted before they meet the values")
            return below
        except AtomSplit as cut:
            sizes = split_sizes(sizes, cut)
    raise NotLowerableError("weights that are reshaped too often")


def _passes_through(node: Node, dtype: torch.dtype) -> bool:
    """Whether a node is its argument unchanged, or rounded to the half type `dtype`, in which a
    product reads it anyway.
    """
    # Hugging Face's eager attention computes the softmax in fp32 and rounds the weights to the
    # values' type, in which the second product takes them here too.
    return type(node) is Map and node.template in ("({0})", rounding_template(dtype))


def _matches(families: Collection[str], nodes: tuple[Node, ...]) -> bool:
    """Whether expressions are a fused operator, or two products of which one reads the elements of
    the other.
    """
    # A convolution is a Dot among the nodes, but no operand of this kernel.
    return "attention" in families or (
        "gemm" in families and "conv" not in families and is_attention(nodes)
    )


TEMPLATE = Template(
    family="attention",
    summary="Fused attention operators, and two matrix products with element-wise steps or a "
    "softmax between; no score is in memory.",
    architectures="sm_80 and newer",
    dtypes="fp32, fp16, bf16",
    propose=_propose,
    lower=_lower,
    # a mask may hide keys
    fusion=FusionRules("product", target_names(HANDLERS), partial_reads=target_names(HANDLERS)),
    handlers=HANDLERS,
    matches_expressions=_matches,
    is_shortlisted=True,
)
