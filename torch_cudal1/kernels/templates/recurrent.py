"""Recurrent layers (LSTM, GRU, plain RNN) in one launch: `recurrent.cu` specialised for a step such
as `aten.lstm.input`.

cuDNN starts kernels for every time step, some microseconds each, and reads the weights again for
each. Here blocks that stay on the GPU hold them in registers, and layers run behind each other as a
wave: a stack of L layers over T steps takes about T + L steps. With two directions a layer needs
all of the one below, so there is a launch for each. Sums are fp32 fused multiply-adds.

For small batches (a step then is all latency), hidden sizes that eight blocks can share, and GPUs
with clusters (sm_90).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.ir.ops.recurrent_ops import TARGETS
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.ir.value_specs import value_specs
from torch_cudal1.kernels.proposal import CudaOptions, KernelSource, Proposal
from torch_cudal1.kernels.template import (
    FusionRules,
    LoweredKernels,
    ProposalRequest,
    Template,
    TemplateInput,
)

__all__ = ["TEMPLATE"]

# MODE and GATES of recurrent.cu.
_MODES = {
    "lstm": (0, 4),
    "gru": (1, 3),
    "rnn_tanh": (2, 1),
    "rnn_relu": (3, 1),
}
_BLOCKS, _RING_STAGES, _MAX_HIDDEN = 8, 4, 256
# Sequences and elements of a row: what a thread's registers hold. Clusters: of eight blocks, as
# many as fit a GPU at once.
_MAX_SEQUENCES, _MAX_ROW_ELEMENTS, _MAX_CLUSTERS = (
    16,
    512,
    16,
)
_MAX_SHARED_BYTES, _MAX_SCRATCH_BYTES = 200 << 10, 1 << 30
# There is one way to compute a stack: the config has only its name.
_CONFIG = {"method": "resident"}
_ARGUMENT_NAMES = (
    "input",
    "hx",
    "params",
    "has_biases",
    "num_layers",
    "dropout",
    "train",
    "bidirectional",
    "batch_first",
)


@dataclass(frozen=True)
class _Stack:
    """The step: sizes, strides in elements, and value numbers. `weights`: for each layer and
    direction, two values, or four with biases.
    """

    mode: int
    gates: int
    steps: int
    sequences: int
    hidden: int
    layers: int
    directions: int
    width: int
    strides: tuple[int, int]
    result_strides: tuple[int, int]
    input: int
    states: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    outs: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of gates that a block holds."""
        return self.gates * self.hidden // _BLOCKS

    def clusters(self, width: int) -> int:
        """The clusters of a layer and direction that reads rows of `width`: one or two that project,
        and one that recurs.
        """
        return (2 if width > _MAX_HIDDEN else 1) + 1


def _is_recurrent(program: Program) -> bool:
    """Whether a Program is one recurrent step and nothing else."""
    return (
        len(program.steps) == 1
        and isinstance(program.steps[0], Aten)
        and program.steps[0].target in TARGETS
    )


def _propose(workload: TemplateInput, request: ProposalRequest) -> tuple[Proposal, ...]:
    """The only proposal, on GPUs where blocks form clusters."""
    # Raises NotLowerableError for what the kernels do not serve, before anything is proposed.
    _define_sizes(_read_stack(workload.program))
    return (Proposal("recurrent", _CONFIG),) if request.sm >= 90 else ()


def _lower(workload: TemplateInput, proposal: Proposal) -> LoweredKernels:
    program = workload.program
    if dict(proposal.config) != _CONFIG:
        raise ProgramError("proposal", f"config {dict(proposal.config)}; expected {_CONFIG}")
    stack, specs, next_value = _read_stack(program), value_specs(program), program.value_count
    sizes = _define_sizes(stack)
    written = {value: specs[value] for value in stack.outs}
    layer_elements, bidirectional = (
        stack.steps * stack.sequences * stack.hidden,
        stack.directions == 2,
    )
    between, products, flags = next_value, next_value + 1, next_value + 2
    if stack.layers > 1:
        # With two directions a layer reads one half of the buffer while it writes the other.
        shape = (
            (2, stack.steps, stack.sequences, 2 * stack.hidden)
            if bidirectional
            else (stack.layers - 1, layer_elements)
        )
        written[between] = _make_dense_spec("float32", shape)
    sets = 2 if bidirectional else stack.layers
    written[products] = _make_dense_spec(
        "float32", (sets, stack.steps, _BLOCKS, stack.sequences, stack.rows)
    )
    # Flags tell other blocks that a step is there. They are cleared by a launch before: flags that
    # a previous call left would let blocks go on before there is anything to read.
    written[flags] = _make_dense_spec("int32", (sizes["FLAGS"],))
    if (scratch_bytes := 4 * sum(spec.numel for spec in written.values())) > _MAX_SCRATCH_BYTES:
        raise NotLowerableError(f"{scratch_bytes} bytes of scratch; at most {_MAX_SCRATCH_BYTES}")
    launches = (
        _plan_bidirectional(stack, between, products, flags)
        if bidirectional
        else _plan_wave(stack, between, products, flags)
    )
    return LoweredKernels(_make_kernels(stack, sizes, flags, launches), written)


@dataclass(frozen=True)
class _Launch:
    """A kernel's body, the value and the C++ declaration of each argument, and its clusters."""

    body: str
    arguments: tuple[tuple[int, str], ...]
    clusters: int


def _plan_wave(stack: _Stack, between: int, products: int, flags: int) -> list[_Launch]:
    """The launch of all layers of a stack with one direction."""
    # Each layer has clusters of its own, and all layers are in one launch.
    clusters = stack.clusters(stack.width) + (stack.layers - 1) * stack.clusters(stack.hidden)
    if clusters > _MAX_CLUSTERS:
        raise NotLowerableError(
            f"{clusters} clusters; at most {_MAX_CLUSTERS} are on a GPU at once"
        )
    arguments, layers = _list_arguments(stack, stack.weights)
    # A single layer has nothing between layers: no scratch is made, and the kernel finds a null
    # pointer.
    middle = "between" if stack.layers > 1 else "nullptr"
    body = f"const Layer layers[] = {layers}; stack(input, hidden, {_format_cell(stack, 'cell')}, layers, result, last, "
    body += f"{_format_cell(stack, 'last_cell')}, {middle}, products, flags);"
    scratch = [(between, "float* between")] if stack.layers > 1 else []
    arguments_before = [
        (stack.input, "const float* input"),
        *arguments,
        (stack.outs[0], "float* result"),
        *_list_last_states(stack),
        *scratch,
    ]
    return [
        _Launch(
            body,
            (*arguments_before, (products, "float* products"), (flags, "u32* flags")),
            clusters,
        )
    ]


def _plan_bidirectional(stack: _Stack, between: int, products: int, flags: int) -> list[_Launch]:
    """A launch for each layer of two directions; the results between layers go to the two halves of
    one buffer in turn.
    """
    launches = []
    half = stack.steps * stack.sequences * 2 * stack.hidden
    dense = f"{stack.sequences * 2 * stack.hidden}, {2 * stack.hidden}"
    for layer in range(stack.layers):
        arguments, directions = _list_arguments(stack, stack.weights[2 * layer : 2 * layer + 2])
        # With two directions a layer needs the whole of the one below: a launch for each orders
        # them.
        first, top = layer == 0, layer == stack.layers - 1
        source = (
            "input, IN_STEP, IN_SEQUENCE"
            if first
            else f"between + {(layer - 1) % 2 * half}, {dense}"
        )
        target = (
            "result, OUT_STEP, OUT_SEQUENCE" if top else f"between + {layer % 2 * half}, {dense}"
        )
        body = f"const Layer layers[] = {directions}; both_ways<{'INPUT' if first else '2 * HIDDEN'}>({layer}, {source}, hidden, "
        body += f"{_format_cell(stack, 'cell')}, layers, {target}, last, {_format_cell(stack, 'last_cell')}, products, flags);"
        launch_arguments = (
            [(stack.input, "const float* input")] * first
            + arguments
            + [(stack.outs[0], "float* result")] * top
            + _list_last_states(stack)
        )
        launch_arguments += [(between, "float* between")] * (stack.layers > 1) + [
            (products, "float* products"),
            (flags, "u32* flags"),
        ]
        width = stack.width if first else 2 * stack.hidden
        launches.append(_Launch(body, tuple(launch_arguments), 2 * stack.clusters(width)))
    return launches


def _list_arguments(
    stack: _Stack, weights: tuple[tuple[int, ...], ...]
) -> tuple[list[tuple[int, str]], str]:
    """States and weights as arguments, and the initialiser of an array of `Layer`."""
    operands = [(stack.states[0], "const float* hidden")]
    operands += [(stack.states[1], "const float* cell")] if stack.mode == 0 else []
    rows = []
    for number, values in enumerate(weights):
        names = [f"w{number}_{i}" for i in range(len(values))]
        operands += [
            (value, f"const float* {name}") for value, name in zip(values, names, strict=True)
        ]
        # A cell without biases has two weights: the kernel finds null pointers in place of the
        # biases.
        rows.append("{" + ", ".join((*names, "nullptr", "nullptr")[:4]) + "}")
    return operands, "{" + ", ".join(rows) + "}"


def _list_last_states(stack: _Stack) -> list[tuple[int, str]]:
    return list(zip(stack.outs[1:], ("float* last", "float* last_cell"), strict=False))


def _format_cell(stack: _Stack, name: str) -> str:
    return name if stack.mode == 0 else "nullptr"


def _make_kernels(
    stack: _Stack, sizes: Mapping[str, int], flags: int, launches: list[_Launch]
) -> tuple[KernelSource, ...]:
    body = (files("torch_cudal1.kernels.templates") / "recurrent.cu").read_text()
    entry_points = [
        (launch.body, ", ".join(text for _, text in launch.arguments)) for launch in launches
    ]
    # everything that changes the code is in the name, which thus stands for one machine code
    digest = hashlib.sha256(
        (body + repr(entry_points) + repr(sorted(sizes.items()))).encode()
    ).hexdigest()[:16]
    text = (
        body + f'extern "C" __global__ void __launch_bounds__(256) clear_{digest}(u32* flags) {{\n'
    )
    text += "  int i = blockIdx.x * 256 + threadIdx.x;\n  if (i < FLAGS) flags[i] = 0;\n}\n"
    # One warp for eight rows of gates, and one more that only fetches what later steps read.
    defines, warps = tuple(sorted(sizes.items())), stack.rows // 8 + 1
    for number, (code, parameters) in enumerate(entry_points):
        # The cluster's size is part of the code: the blocks of a cluster hand each other the hidden
        # state.
        text += 'extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)\n'
        text += f"recur{number}_{digest}({parameters}) {{\n  {code}\n}}\n"
    # Launches of one stream run in order: the flags are 0 before the first block of the next
    # kernel.
    clearing = KernelSource(
        f"clear_{digest}",
        text,
        ((flags, "*"),),
        -(-sizes["FLAGS"] // 256),
        8,
        cuda=CudaOptions(defines),
    )
    cuda = CudaOptions(defines, _count_shared_bytes(stack), _BLOCKS)
    pointers = [tuple((value, "*") for value, _ in launch.arguments) for launch in launches]
    grids = [launch.clusters * _BLOCKS for launch in launches]
    recurring = [
        KernelSource(f"recur{number}_{digest}", text, pointer_arguments, grid, warps, cuda=cuda)
        for number, (pointer_arguments, grid) in enumerate(zip(pointers, grids, strict=True))
    ]
    return (clearing, *recurring)


def _count_shared_bytes(stack: _Stack) -> int:
    """Bytes of shared memory of a block: a ring where it projects; two states, a ring and the gates
    where it recurs. Raises NotLowerableError where that is too much.
    """
    widest = max(stack.width, (stack.layers > 1) * stack.hidden * stack.directions)
    # A block either projects or recurs; all blocks of a launch have the same shared memory.
    projects = _RING_STAGES * stack.sequences * -(-widest // 32) * 32
    recurs = stack.sequences * (2 * stack.hidden + (_RING_STAGES + 1) * stack.rows)
    if (needed := 4 * max(projects, recurs)) > _MAX_SHARED_BYTES:
        raise NotLowerableError(f"{needed} bytes of shared memory; at most {_MAX_SHARED_BYTES}")
    return needed


def _define_sizes(stack: _Stack) -> dict[str, int]:
    _count_shared_bytes(stack)
    return {
        "MODE": stack.mode,
        "GATES": stack.gates,
        "STEPS": stack.steps,
        "SEQUENCES": stack.sequences,
        "HIDDEN": stack.hidden,
        "BIAS": int(len(stack.weights[0]) == 4),
        "LAYERS": stack.layers,
        "DIRECTIONS": stack.directions,
        "INPUT": stack.width,
        "IN_STEP": stack.strides[0],
        "IN_SEQUENCE": stack.strides[1],
        "OUT_STEP": stack.result_strides[0],
        "OUT_SEQUENCE": stack.result_strides[1],
        "FLAGS": stack.layers * stack.directions * stack.steps * _BLOCKS * 3,
    }


def _read_stack(program: Program) -> _Stack:
    """Read the step. Raises NotLowerableError with what the kernels do not serve."""
    if not _is_recurrent(program):
        raise NotLowerableError("no recurrent step by itself")
    (step,) = program.steps
    assert isinstance(step, Aten)
    if len(step.args) != len(_ARGUMENT_NAMES) or step.kwargs:
        raise NotLowerableError(
            f"{step.target} with {len(step.args)} plain arguments; expected {', '.join(_ARGUMENT_NAMES)}"
        )
    bound: dict[str, Any] = dict(zip(_ARGUMENT_NAMES, step.args, strict=True))
    specs = value_specs(program)
    mode, gates = _MODES[step.target.split(".")[1]]
    states = bound["hx"] if isinstance(bound["hx"], tuple) else (bound["hx"],)
    directions, batch_first = 1 + bool(bound["bidirectional"]), bool(bound["batch_first"])
    weights_per_cell = 4 if bound["has_biases"] else 2
    params, layers = bound["params"], int(bound["num_layers"])
    operands = (bound["input"], *states, *params)
    if (
        not all(isinstance(value, Value) for value in operands)
        or len(params) != weights_per_cell * layers * directions
    ):
        raise NotLowerableError("weights of another form, such as those of a projected LSTM")
    source, result = specs[bound["input"].index], specs[step.outs[0]]
    hidden = specs[states[0].index].shape[-1]
    time, batch = (1, 0) if batch_first else (0, 1)
    stack = _Stack(
        mode,
        gates,
        steps=source.shape[time],
        sequences=source.shape[batch],
        hidden=hidden,
        layers=layers,
        directions=directions,
        width=source.shape[2],
        strides=(source.strides[time], source.strides[batch]),
        result_strides=(result.strides[time], result.strides[batch]),
        input=bound["input"].index,
        states=tuple(value.index for value in states),
        weights=tuple(
            tuple(v.index for v in params[i : i + weights_per_cell])
            for i in range(0, len(params), weights_per_cell)
        ),
        outs=tuple(step.outs),
    )
    _refuse_unserved(stack, specs, source, result)
    return stack


def _refuse_unserved(
    stack: _Stack, specs: Mapping[int, TensorSpec], source: TensorSpec, result: TensorSpec
) -> None:
    dense = [
        specs[value]
        for value in (*stack.states, *(value for values in stack.weights for value in values))
    ]
    # Layers above the first read what the layer below wrote, of both directions.
    widths = {stack.width, *([stack.hidden * stack.directions] if stack.layers > 1 else [])}
    shapes = {specs[values[1]].shape for values in stack.weights}
    problems = {
        "float32 only": any(spec.dtype != "float32" for spec in (source, result, *dense)),
        # Eight blocks share the hidden units.
        "a hidden size of 64, 128, 192 or 256": stack.hidden % 64 != 0
        or not 0 < stack.hidden <= _MAX_HIDDEN,
        f"at most {_MAX_SEQUENCES} sequences": stack.sequences > _MAX_SEQUENCES,
        f"rows of at most {_MAX_ROW_ELEMENTS}": max(widths) > _MAX_ROW_ELEMENTS,
        "dense states and weights, features next to each other": source.strides[2] != 1
        or result.strides[2] != 1
        or any(spec.strides != _make_dense_spec(spec.dtype, spec.shape).strides for spec in dense),
        "hidden states as wide as the result of a cell": shapes
        != {(stack.gates * stack.hidden, stack.hidden)},
        "at least one step": stack.steps < 1,
    }
    if unserved := [text for text, broken in problems.items() if broken]:
        raise NotLowerableError(f"recurrent kernels serve {unserved[0]}")


def _make_dense_spec(dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return TensorSpec(dtype, shape, strides, "cuda")


TEMPLATE = Template(
    family="recurrent",
    summary="LSTM, GRU and plain RNN layers of small batches, a whole stack in one launch.",
    architectures="sm_90 and newer",
    dtypes="fp32",
    propose=_propose,
    lower=_lower,
    # a group of its own: its kernels take no further step in
    fusion=FusionRules("sequence", TARGETS, takes_epilogue=False),
    matches_program=_is_recurrent,
)
