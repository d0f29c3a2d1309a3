"""PyTorch's own operator database as input: a Program computes what eager computes, or the operator
is refused with a reason.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip(
    "expecttest", reason="PyTorch's operator database needs expecttest, of the extra `test`"
)
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from tests.entries import Runs, count_runs, plant_regions
from torch_cudal1.api.backend import cudal1
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.graph.capture import trace
from torch_cudal1.graph.captured import capture_call_graphs
from torch_cudal1.graph.lower import LoweredRegion, lower
from torch_cudal1.graph.module_call import Call
from torch_cudal1.graph.swap import reorder_inputs, swap
from torch_cudal1.ir.check import is_random_program
from torch_cudal1.ir.program import Program, canonical_json
from torch_cudal1.ir.records import Candidate

# Importing PyTorch's test utilities forbids this process to set backend flags by assignment, as users
# and other tests do.
torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True
# They look for the unittest.TestCase that asks for a sample by reading the source of every frame of
# the stack, 0.05 s an operator. There is none here.
common_utils.extract_test_fn = lambda: None

CPU = torch.device("cpu")
UNINITIALISED = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
}
OPS = [
    op
    for op in op_db
    if torch.float32 in op.supported_dtypes("cpu")
    and op.name not in UNINITIALISED
    and not op.name.startswith("jiterator")
]
PARTS = 8  # one test each: a failure names the operator, and the parts can run side by side
# Traced as a formula of simpler operators, which rounds in another order; SVD and its kin compute
# vectors with the values.
ROUNDS_DIFFERENTLY = ("interpolate", "upsample", "linalg", "svd", "lowrank")
# torch.compile of these gives a copy where eager gives the input itself.
KNOWN_ALIASING = {"nn.functional.dropout"}

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Called(torch.nn.Module):
    """An operator as a module."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)


def samples(
    ops: Sequence[Any], *, gradients: bool = False
) -> Iterator[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
    """Name, function and first sample of every operator."""
    for op in ops:
        if gradients and not op.supports_autograd:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sample = next(
                iter(op.sample_inputs("cpu", torch.float32, requires_grad=gradients)), None
            )
        if sample is not None:
            name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
            # A function of its own each: torch.compile remembers what it compiled by the code.
            yield (
                name,
                (lambda *args, _op=op, **kwargs: _op.op(*args, **kwargs)),
                (sample.input, *sample.args),
                sample.kwargs,
            )


def capture_and_run(function: Any, args: Any, kwargs: Any) -> tuple[Call, list[LoweredRegion]]:
    """The operator as `accelerate` captures it, its graphs run as Programs, and what these were
    lowered from.
    """
    call, traced = capture_call_graphs(Called(function), args, kwargs)
    lowered = [lower(graph.module, static=graph.static, kind=graph.kind) for graph in traced.graphs]
    for item in lowered:
        program = item.region.program
        read = Program.from_json(
            json.loads(canonical_json(program.to_json())), program.all_payloads()
        )
        assert read.digest == program.digest
        swapped = swap(item.region, Candidate(read, "eager", "rewrites"), CPU, strictness="error")
        traced.fill(item.region.kind, reorder_inputs(swapped, item.order))
    written = frozenset(
        origin for graph in traced.graphs for origin in graph.writes if isinstance(origin, int)
    )
    return call.wrap_compiled(traced.call, written), lowered


def copies(tree: Any) -> Any:
    return pytree.tree_map(
        lambda t: (
            t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t
        ),
        tree,
    )


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def difference(name: str, result: Any, eager_result: Any, *, gradient: bool = False) -> str:
    """ "" or what differs. Exact, but for operators that are traced as a formula, and gradients."""
    loose = gradient or any(word in name for word in ROUNDS_DIFFERENTLY)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if loose else {"rtol": 0, "atol": 0}
    if len(tensors(result)) != len(tensors(eager_result)):
        return f"{name}: {len(tensors(result))} tensors, eager gives {len(tensors(eager_result))}"
    try:
        for mine, expected in zip(tensors(result), tensors(eager_result), strict=True):
            torch.testing.assert_close(
                mine, expected, equal_nan=True, check_stride=not gradient, **tolerance
            )
    except AssertionError as error:
        return f"{name}: {error}"
    return ""


def eager(function: Any, args: Any, kwargs: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return function(*copies(args), **copies(kwargs))


def seeds_itself(function: Any, args: Any, kwargs: Any, eager_tensors: list[torch.Tensor]) -> bool:
    """The database wraps some random operators so that they seed the generator and put it back,
    which no graph repeats.
    """
    return all(
        torch.equal(a, b)
        for a, b in zip(eager_tensors, tensors(eager(function, args, kwargs, seed=1)), strict=True)
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_both_doors_run_programs_that_compute_what_eager_computes_under_one_key(
    part, monkeypatch, tmp_path
):
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    keys: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        try:
            regions = [
                lower(graph.module, static=graph.static, kind=graph.kind).region
                for graph in trace(gm, inputs).graphs
            ]
        except NotLowerableError:
            return gm.forward
        keys.extend(region.key for region in regions)
        plant_regions(regions, tmp_path)
        return cudal1(gm, inputs, options={"cache_dir": tmp_path, "strictness": "error"})

    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda gm, inputs, config_patches=None: gm.forward
    )
    for name, function, args, kwargs in samples(OPS[part::PARTS]):
        torch._dynamo.reset()
        keys.clear()
        with torch.no_grad():
            eager_result = eager(function, args, kwargs)
            compiled = torch.compile(function, backend=backend, dynamic=False)
            torch.manual_seed(0)
            through_backend = compiled(*copies(args), **copies(kwargs))
            try:
                call, lowered = capture_and_run(function, copies(args), copies(kwargs))
            except NotLowerableError as refused:
                outcomes["refused" if refused.reason else "refused without a reason"] += 1
                call, lowered = (lambda args, kwargs, result=eager_result: result), []
            torch.manual_seed(0)
            through_accelerate = call(copies(args), copies(kwargs))
            random = any(is_random_program(item.region.program) for item in lowered)
            if random and seeds_itself(function, args, kwargs, tensors(eager_result)):
                continue
        outcomes["served"] += bool(lowered)
        if lowered and keys and [item.region.key for item in lowered] != keys:
            wrong.append(f"{name}: another key in each door")
        wrong += [
            text
            for result in (through_accelerate, through_backend)
            if (text := difference(name, result, eager_result))
        ]
    torch._dynamo.reset()
    assert wrong == []
    assert outcomes["served"] > 60  # of about 83 in each part
    assert outcomes["refused"] < 15
    assert outcomes["refused without a reason"] == 0


@pytest.mark.parametrize("part", range(0, PARTS, 2))
def test_a_training_step_of_swapped_graphs_gives_eager_s_results_and_gradients(part):
    wrong: list[str] = []
    served = 0
    for name, function, args, kwargs in samples(OPS[part::PARTS], gradients=True):
        args, kwargs = copies((args, kwargs))
        try:
            call, lowered = capture_and_run(function, args, kwargs)
        except NotLowerableError:
            continue
        outcomes = []
        for run in (call, lambda args, kwargs, function=function: function(*args, **kwargs)):
            inputs = copies((args, kwargs))
            torch.manual_seed(0)
            out = run(*inputs)
            outcomes.append((out, gradients_of(out, inputs)))
        random = any(is_random_program(item.region.program) for item in lowered)
        if random and seeds_itself(function, args, kwargs, tensors(outcomes[1][0])):
            continue
        served += 1
        (result, slopes), (eager_result, expected) = outcomes
        wrong += [text for text in [difference(name, result, eager_result)] if text]
        if name not in KNOWN_ALIASING:
            wrong += [text for text in [difference(name, slopes, expected, gradient=True)] if text]
    assert wrong == []
    assert served > 45


def gradients_of(out: Any, inputs: Any) -> list[torch.Tensor]:
    """Gradients of the sum of squares by every input; zeros where an output does not depend on it."""
    losses = [(o * o.conj()).real.sum() for o in tensors(out) if o.grad_fn is not None]
    leaves = [t for t in tensors(inputs) if t.requires_grad]
    if not losses or not leaves:
        return []
    slopes = torch.autograd.grad(losses, leaves, allow_unused=True)
    return [
        torch.zeros_like(t) if slope is None else slope
        for t, slope in zip(leaves, slopes, strict=True)
    ]


BREADTH = OPS[5::12]  # about 55 operators across the alphabet


def test_torch_compile_with_this_backend_runs_operators_as_eager_does(monkeypatch, tmp_path):
    """The baseline path: nothing is cached, so Inductor's double runs the graph as it is, and
    nothing of the package may fail.
    """
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda gm, inputs, config_patches=None: gm.forward
    )
    runs: Runs = count_runs(monkeypatch)
    wrong: list[str] = []
    compared = 0
    telemetry.reset()
    for name, function, args, kwargs in samples(BREADTH):
        torch._dynamo.reset()
        compiled = torch.compile(
            function, backend=cudal1, options={"cache_dir": tmp_path, "strictness": "error"}
        )
        with torch.no_grad():
            torch.manual_seed(0)
            result = compiled(*copies(args), **copies(kwargs))
            wrong += [
                text for text in [difference(name, result, eager(function, args, kwargs))] if text
            ]
        compared += 1
    torch._dynamo.reset()
    assert wrong == []
    assert compared >= 50
    assert (telemetry.report().counters.get("fallbacks", 0), runs.total) == (0, 0)
