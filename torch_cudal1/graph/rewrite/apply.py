"""Applies rewrite rules to a graph until nothing changes, and keeps what every rule must keep.

After a rule changed something: dead code is removed (never random or mutating calls), the graph is
linted, `meta["val"]` is recomputed, and each output must still have its dtype, shape, strides and
aliasing. Lost strides or freshness are repaired by a copy; what cannot be repaired undoes the rule.
Whether the numbers are right is the rule's promise and the judge's test.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from torch_cudal1.core import telemetry
from torch_cudal1.graph.rewrite.match import emit_strided_copy, fake_mode, is_dead_when_unused
from torch_cudal1.graph.rewrite.rule import Rule

__all__ = ["MAX_ROUNDS", "RewriteResult", "rewrite"]

# Rules enable one another a few times; two rules that undo each other would never stop.
MAX_ROUNDS = 8
_Spec: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class RewriteResult:
    """The rewritten graph (the caller's is untouched), the names of the rules that fired in order
    of first use, and their sites.
    """

    gm: fx.GraphModule
    techniques: tuple[str, ...]
    sites: Mapping[str, int]


def rewrite(gm: fx.GraphModule, rules: Iterable[Rule], *, assume_finite: bool) -> RewriteResult:
    """Run `rules` on a copy of `gm` until none changes it. Rules marked `finite_only` run only with
    `assume_finite`.

    A graph with symbolic shapes, or with a mutation before its last computation, comes back as it
    was.
    """
    # The caller's graph is the baseline, so no rule may touch it.
    good, mode = _copy(gm), fake_mode(gm.graph)
    sites: Counter[str] = Counter()
    if mode is None or not _is_static(gm) or not _mutates_last(gm.graph):
        return RewriteResult(good, (), {})
    # From the graph itself: what its outputs are now is what callers were promised.
    output_specs = _describe(_propagate(good, mode))
    # `good` is the last state that was checked: an undone rule falls back to it.
    work = _copy(good)
    active = [rule for rule in rules if assume_finite or not rule.finite_only]
    for _round in range(MAX_ROUNDS):
        changed = False
        # A tuple, since an undone rule is removed on the way.
        for rule in tuple(active):
            site_count, undo_reason = _attempt(rule, work)
            if not (site_count or undo_reason):
                continue
            undo_reason = undo_reason or _check_outputs(work, mode, output_specs)
            if undo_reason:
                telemetry.record("rewrite", "undone", rule=rule.name, reason=undo_reason)
                work = _copy(good)
                # It would fail again in the next round, at the same place.
                active.remove(rule)
            elif _describe_graph(work.graph) != _describe_graph(good.graph):
                # A repair can restore exactly what the rule removed.
                good, changed = _copy(work), True
                sites[rule.name] += site_count
        if not changed:
            break
    # Rules edit `graph`; the module's `forward` is generated from it.
    good.recompile()
    return RewriteResult(good, tuple(sites), dict(sites))


def _attempt(rule: Rule, gm: fx.GraphModule) -> tuple[int, str]:
    """Sites that the rule changed, or why it has to be undone: it met something that its author did
    not think of.
    """
    try:
        return rule.rewrite(gm), ""
    except (
        RuntimeError,
        ValueError,
    ) as error:
        # ATen's shape functions raise these, as in `_check_outputs`.
        return 0, f"{type(error).__name__}: {error}"


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    # Not deepcopy of the module: that would copy constants, which no rule edits.
    # The graph alone is copied; the new module refers to the caller's constants.
    graph = copy.deepcopy(gm.graph)
    return fx.GraphModule(gm, graph)


def _describe_graph(graph: fx.Graph) -> list[str]:
    """The graph without names: equal texts compute the same thing in the same order."""
    number = {node: f"%{position}" for position, node in enumerate(graph.nodes)}
    target = {
        node: "" if node.op in ("placeholder", "output") else str(node.target)
        for node in graph.nodes
    }
    return [
        f"{node.op} {target[node]} {fx.map_arg((node.args, node.kwargs), number.__getitem__)}"
        for node in graph.nodes
    ]


def _is_static(gm: fx.GraphModule) -> bool:
    input_values = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
    tensors = [v for v in input_values if isinstance(v, torch.Tensor)]
    symbolic = any(isinstance(v, torch.SymInt) for v in input_values)
    # Rules compute with sizes and strides, and a symbolic one has no value.
    return not symbolic and all(
        type(n) is int for t in tensors for n in (*t.shape, *t.stride(), t.storage_offset())
    )


def _mutates_last(graph: fx.Graph) -> bool:
    """Whether nothing but mutations, outputs and views of them follows the first mutating call
    (AOTAutograd's epilogue).
    """
    mutated = False
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        schema = getattr(node.target, "_schema", None)
        mutates = schema is not None and schema.is_mutable
        # A rule may move a value across a mutation, and would read it before or after the write.
        if mutated and not mutates:
            return False
        mutated = mutated or mutates
    return True


def _check_outputs(gm: fx.GraphModule, mode: FakeTensorMode, expected: Sequence[_Spec]) -> str:
    """Clean up after a rule. Returns why the rule has to be undone, or an empty string."""
    _clean(gm)
    try:
        actual = _describe(_propagate(gm, mode))
        if actual == expected:
            return ""
        # Strides are repaired here, so that not every rule has to think of them.
        if not _restore_strides(gm.graph, expected, actual):
            return f"outputs changed from {expected} to {actual}"
        _clean(gm)
        actual = _describe(_propagate(gm, mode))
    except (RuntimeError, ValueError) as error:
        # Shape functions of ATen raise these: for instance a view of an intermediate whose strides
        # the rule changed.
        return f"{type(error).__name__}: {error}"
    return "" if actual == expected else f"repaired outputs are {actual}, expected {expected}"


def _clean(gm: fx.GraphModule) -> None:
    # A random call without readers stays: dropping it would shift the generator for later calls.
    gm.graph.eliminate_dead_code(is_impure_node=lambda node: not is_dead_when_unused(node))
    # Finds a node that is used before it is made, which a faulty rule can leave.
    gm.graph.lint()


def _propagate(gm: fx.GraphModule, mode: FakeTensorMode) -> tuple[list[Any], list[Any]]:
    """Recompute `meta["val"]` of every node; fake inputs and fake outputs, whose storages show what
    aliases what.
    """
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        # The inputs are fakes already; new ones would have new storages and lose which inputs
        # alias.
        out = FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    return inputs, list(out) if isinstance(out, (tuple, list)) else [out]


def _describe(values: tuple[list[Any], list[Any]]) -> list[_Spec]:
    """Of each output what must stay: dtype, shape, strides, device, and the first input or output
    it shares storage with.
    """
    inputs, outputs = values
    first: dict[int, str] = {}
    for position, value in enumerate(inputs):
        if isinstance(value, torch.Tensor):
            # Two inputs may share memory, and the first names it.
            first.setdefault(_identify_storage(value), f"input {position}")
    specs: list[_Spec] = []
    for position, value in enumerate(outputs):
        if not isinstance(value, torch.Tensor):
            specs.append((value,))
            continue
        owner = first.setdefault(_identify_storage(value), f"output {position}")
        specs.append((value.dtype, tuple(value.shape), tuple(value.stride()), value.device, owner))
    return specs


def _identify_storage(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _restore_strides(graph: fx.Graph, expected: Sequence[_Spec], actual: Sequence[_Spec]) -> bool:
    """Put a copy with the wanted strides before each output that needs one. False if an output
    needs more than a copy.
    """
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    many = isinstance(output.args[0], (tuple, list))
    results: list[Any] = list(output.args[0]) if many else [output.args[0]]
    # No copy can make up for an output that is missing.
    if len(expected) != len(actual):
        return False
    for position, (want, have) in enumerate(zip(expected, actual, strict=True)):
        if want == have:
            continue
        # A copy is fresh, so it can only stand for an output that aliased nothing before it.
        if (
            len(want) < 5
            or want[:2] != have[:2]
            or want[3] != have[3]
            or want[4] != f"output {position}"
        ):
            return False
        with graph.inserting_before(output):
            results[position] = emit_strided_copy(graph, results[position], want[1], want[2])
        if results[position] is None:
            return False
    output.args = (tuple(results) if many else results[0],)
    return True
