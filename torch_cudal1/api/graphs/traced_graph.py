"""The ATen graphs of one Dynamo graph, each with what was chosen for it: which of them run, after
the end-to-end measurement, and the callable of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torch_cudal1.api.graphs.graph_evidence import (
    choose_by_evidence,
    has_inductor_in_every_benchmark,
)
from torch_cudal1.api.ranks.consensus import Broadcast, NoConsensus
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.check import is_random_program

if TYPE_CHECKING:
    from torch_cudal1.api.graphs.graph_decision import GraphRequest
    from torch_cudal1.api.signatures.recalled_capture import RecalledGraph
    from torch_cudal1.graph.capture import TracedModule
    from torch_cudal1.graph.lower import LoweredRegion
    from torch_cudal1.graph.swap import Swapped
    from torch_cudal1.search.tune import Choice

__all__ = ["FilledGraph", "TracedGraph", "select_example_tensors"]

# A callable of this type takes the graph's inputs one by one.
_GraphCall: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class FilledGraph:
    """The whole of a trace, `call`, and the callables that its graphs were given. `refill` puts them
    into the trace, where another contender's may stand; a call of this object does so first.
    """

    call: _GraphCall
    swapped: Sequence[Swapped]
    refill: Callable[[], None]

    def __call__(self, *inputs: Any) -> Any:
        self.refill()
        return self.call(*inputs)

    @property
    def quarantined(self) -> str:
        """Why one of its graphs runs its reference; "" where none does."""
        return next(filter(None, (item.quarantined for item in self.swapped)), "")


@dataclass(frozen=True)
class TracedGraph:
    """The ATen graphs of a request, forward and backward, with the choice for each."""

    request: GraphRequest
    traced: TracedModule | RecalledGraph
    graphs: Sequence[LoweredRegion]
    choices: Sequence[Choice]

    def decide(self) -> tuple[_GraphCall | None, Broadcast | NoConsensus]:
        """Decide by the evidence of the choices and, in a search, by a measurement here."""
        request, context = self.request, self.request.context
        runs = self._decide_by_evidence()

        def build(inductor: Callable[[], _GraphCall]) -> _GraphCall:
            return request.build_untraced(runs, inductor) or self.build()

        final, call = runs, None
        # Outside a search the user waits for an answer, so what was measured before counts.
        if context.settings.on_miss == "tune" and not self._has_won_before():
            final, call = self._measure(runs, build)
        # Swaps that won by evidence alone are not written down: the record would say that this
        # process measured them.
        if request.name and (runs != "swaps" or call is not None):
            record = {
                "runs": final,
                "regions": [item.region.key for item in self.graphs],
                "candidates": self._digests,
            }
            context.cache.put_decision_record(
                request.name, record, context.target, context.contract
            )
        # For "inductor" None is right: the caller then compiles as torch.compile does.
        if call is None and final != "inductor":
            call = build(request.compile_inductor)
        entries = tuple(choice.entry for choice in self.choices if choice.entry is not None)
        return call, Broadcast(final, entries=entries if final == "swaps" else ())

    def build(self) -> _GraphCall:
        """The traced graphs, each with its choice as its callable."""
        return self.fill().call

    def fill(self) -> FilledGraph:
        """The same, with what tells whether a choice failed."""
        from torch_cudal1.api.shadow import check_composed, wrap_with_checks
        from torch_cudal1.graph.swap import reorder_inputs, swap

        context, traced, swapped_graphs = self.request.context, self.traced, []
        # A call that writes to its inputs cannot be checked by a second run.
        writes = any(graph.writes for graph in traced.graphs)
        for item, choice in zip(self.graphs, self.choices, strict=True):
            telemetry.record("swap", "runs", choice.region.key, what=choice.candidate.label)
            wrapper = wrap_with_checks(choice, context, writes=writes)
            swapped = swap(
                choice.region,
                choice.candidate,
                context.device,
                strictness=context.settings.strictness,
                options=self.request.options,
                around=None if isinstance(wrapper, Refusal) else wrapper,
            )
            if context.settings.on_miss == "tune":
                inputs = select_example_tensors(item, self.request.inputs)
                # Of a composed whole that fails, the reference is measured against Inductor.
                if (refusal := check_composed(choice, swapped, inputs, context)) is not None:
                    swapped.quarantined = swapped.quarantined or refusal.reason
            swapped_graphs.append(swapped)

        def refill() -> None:
            for item, swapped in zip(self.graphs, swapped_graphs, strict=True):
                traced.fill(item.region.kind, reorder_inputs(swapped, item.order))

        refill()
        return FilledGraph(traced.call, swapped_graphs, refill)

    def fill_checked(self) -> FilledGraph:
        """`fill`, for choices that were composed of blocks. Raises NotLowerableError where they do not
        compute on the request's inputs what the graph's own operators compute.
        """
        from torch_cudal1.api.shadow import check_composed

        filled_graph = self.fill()
        for item, choice, swapped in zip(
            self.graphs, self.choices, filled_graph.swapped, strict=True
        ):
            inputs = select_example_tensors(item, self.request.inputs)
            refusal = check_composed(choice, swapped, inputs, self.request.context)
            if refusal is not None:
                raise NotLowerableError(refusal.reason)
        return filled_graph

    @cached_property
    def _digests(self) -> list[str]:
        return [choice.candidate.digest for choice in self.choices]

    def _decide_by_evidence(self) -> str:
        runs = self._read_module_trial_winner() or choose_by_evidence(
            self.choices, self.request.context.settings.margin
        )
        return "inductor+graph" if runs == "swaps" and self._is_graphed_inductor() else runs

    def _measure(
        self, runs: str, build: Callable[[Callable[[], _GraphCall]], _GraphCall]
    ) -> tuple[str, _GraphCall | None]:
        """What runs after the end-to-end check, and its callable (None: not built yet).

        A graph in which PyTorch itself records CUDA graphs is not called on copies: it would be
        recorded at their addresses.
        """
        from torch_cudal1.api.end_to_end import GraphUnderTest, end_to_end_check

        request = self.request
        trains = any(part.kind == "backward" for part in self.traced.graphs)
        # Inductor's own CUDA graphs (`triton.cudagraphs`) record the addresses of the first calls.
        # Recorded during a measurement, they would hold the addresses of its copies.
        can_copy = not request.options.get("triton.cudagraphs")
        graph = GraphUnderTest(
            request.inputs,
            request.context.device,
            # Compiled once, however many contenders ask for it.
            cache(request.compile_inductor),
            is_pure=self.traced.is_pure,
            has_benchmark=has_inductor_in_every_benchmark(self.choices),
            written=self.traced.written if trains and can_copy else None,
        )
        return end_to_end_check(graph, runs, build, request.gm.forward)

    def _is_graphed_inductor(self) -> bool:
        """Whether what won is Inductor's own result for this graph, replayed: then Inductor's own
        caches serve the next process.
        """
        first = self.choices[0]
        # A rewritten Program under the same schedule is not Inductor's result for the user's graph.
        unchanged = (
            first.candidate.schedule == "inductor+graph"
            and first.candidate.program == first.region.program
        )
        # What `accelerate` swapped in for the same region writes to nothing.
        is_replayable = self.traced.is_pure and not is_random_program(first.region.program)
        return unchanged and is_replayable and self.request.can_be_graphed()

    def _read_module_trial_winner(self) -> str:
        """What won when `accelerate` measured this very training step as a whole; "" if it never
        did.
        """
        from torch_cudal1.search.tune import make_end_to_end_name

        # One region is an inference graph; the record that is asked for is of a training step.
        if len(self.choices) < 2:
            return ""
        record = self._read_record(make_end_to_end_name(self.choices))
        return {"eager": "eager", "torch.compile": "inductor", "cudal1": "swaps"}.get(
            str(record.get("winner")), ""
        )

    def _has_won_before(self) -> bool:
        """Whether an earlier process measured what these candidates make of this graph, and they
        did not lose.
        """
        # A graph that lost has a record too, one of "inductor", which never comes here.
        return bool(self.request.name and self._read_record(self.request.name))

    def _read_record(self, name: str) -> dict[str, Any]:
        """The decision record of these very candidates; empty where there is none."""
        record = self.request.context.find_decision_record(name, self._digests)
        # A record of other candidates says nothing of these: an entry may have been replaced since.
        if isinstance(record, dict) and record.get("candidates") == self._digests:
            return record
        return {}


def select_example_tensors(item: LoweredRegion, inputs: Sequence[Any]) -> list[torch.Tensor] | None:
    """The user's tensors in the region's order, where Dynamo gave real ones; a backward graph has
    none.
    """
    # Fake tensors have no data, and a backward's inputs do not exist before its forward has run.
    if item.region.kind == "backward" or any(isinstance(tensor, FakeTensor) for tensor in inputs):
        return None
    return [inputs[position].detach() for position in item.order]
