"""The end-to-end measurement of a module's call, and the decision that the cache remembers of it.

A contender stays only if it beats the module's own forward, whole call against whole call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from torch_cudal1.api.contenders import ServedCall
from torch_cudal1.api.end_to_end import (
    MIN_SPEEDUP,
    TORCH_COMPILE,
    end_to_end_benchmark,
    format_speedup,
    list_summary_facts,
    select_faster,
)
from torch_cudal1.api.gradients.training_step import compute_gradients
from torch_cudal1.core import telemetry
from torch_cudal1.graph.functional_module import preserve_random_state
from torch_cudal1.graph.module_call import Call, ModuleCall
from torch_cudal1.judge.benchmark.statistics import PairedSummary
from torch_cudal1.search.tune import Choice, make_end_to_end_name
from torch_cudal1.store.context import TuneContext

__all__ = [
    "EndToEndDecision",
    "ModuleTrial",
    "find_remembered_decision",
    "remember_decision",
    "run_trial",
]


@dataclass(frozen=True)
class EndToEndDecision:
    """What won end to end, a sentence about it, and its callable if it was built to be measured."""

    winner: str
    note: str
    call: Call | None = None


@dataclass(frozen=True)
class ModuleTrial:
    """The example call of the end-to-end measurement, and the graph inputs that it writes to."""

    module: torch.nn.Module
    example: tuple[tuple[Any, ...], dict[str, Any]]
    captured: ModuleCall
    written: frozenset[int]
    is_training: bool

    @contextmanager
    def arguments(self, device: torch.device) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The user's arguments; afterwards every tensor that the call writes to, its version counter
        and the random generators are as before.
        """
        # Only what the call writes is put back: a write to anything else would count as a change
        # for a graph that waits for its backward.
        tensors = [self.captured.inputs[number] for number in sorted(self.written)]
        saved = [tensor.detach().clone() for tensor in tensors]
        try:
            with (
                torch.random.fork_rng(
                    [device.index or 0] if device.type == "cuda" else [], device_type="cuda"
                ),
                preserve_random_state(),
            ):
                yield self.example
        finally:
            # The values are the old ones, so the version must be too: a new one would make autograd
            # refuse a graph that the user still holds.
            with torch.no_grad(), _unsafe_preserve_version_counter(tuple(tensors)):
                for tensor, value in zip(tensors, saved, strict=True):
                    tensor.copy_(value)

    def time_against_forward(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], context: TuneContext
    ) -> PairedSummary:
        """Paired times of the module's own forward and `call`; with their backward where gradients
        are wanted.
        """
        return end_to_end_benchmark(
            self.make_forward_step(args, kwargs),
            self.make_served_step(call, args, kwargs, context),
            context.device,
            margin=MIN_SPEEDUP,
        )

    def time_against_each_other(
        self, a: Call, b: Call, args: tuple[Any, ...], kwargs: dict[str, Any], context: TuneContext
    ) -> PairedSummary:
        """The same for two contenders: the speed-up of `b` over `a`."""
        return end_to_end_benchmark(
            self.make_served_step(a, args, kwargs, context),
            self.make_served_step(b, args, kwargs, context),
            context.device,
            margin=MIN_SPEEDUP,
        )

    def make_forward_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
        """A measured step of the module's own forward."""
        return self._make_step(self.module._call_impl, args, kwargs)

    def make_served_step(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], context: TuneContext
    ) -> Callable[[], Any]:
        """A measured step of a contender, as later calls will be served. It has run once."""
        served = (
            # Inference is measured as later calls will be served. A training step never comes from
            # the table.
            call.put_dispatch_table_first(args, kwargs, context)
            if isinstance(call, ServedCall) and not self.is_training
            else call
        )
        step = self._make_step(lambda *args, **kwargs: served(args, kwargs), args, kwargs)
        # A first call may compile, and other processes must not wait for the GPU's lock meanwhile.
        step()
        return step

    def _make_step(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any]:
        """One measured step. Positions in caches are put back first, for either contender: after
        enough calls they would lie outside the cache.
        """
        leaves = [leaf for leaf in self.captured.inputs if leaf.requires_grad]
        written = [self.captured.inputs[number] for number in sorted(self.written)]
        # A decoder's position in its cache grows with each call: after enough of them it would lie
        # outside. Tensors of integers are taken for positions.
        positions = [
            tensor for tensor in written if not (tensor.is_floating_point() or tensor.is_complex())
        ]
        saved = [tensor.clone() for tensor in positions]

        def run() -> Any:
            if positions:
                with torch.no_grad(), _unsafe_preserve_version_counter(tuple(positions)):
                    torch._foreach_copy_(positions, saved)
            return (
                compute_gradients(call(*args, **kwargs), leaves)
                if self.is_training
                else call(*args, **kwargs)
            )

        return run


def find_remembered_decision(
    builders: Mapping[str, Any], choices: tuple[Choice, ...], context: TuneContext
) -> EndToEndDecision | None:
    """The end-to-end decision of an earlier process for these very candidates, if there is one."""
    # The name holds regions, not candidates: after a new search the record may be of other kernels.
    candidates = [choice.candidate.digest for choice in choices]
    record = context.find_decision_record(make_end_to_end_name(choices), candidates)
    if not isinstance(record, dict) or record.get("candidates") != candidates:
        return None
    winner = str(record.get("winner"))
    return (
        EndToEndDecision(winner, str(record.get("note")))
        if winner == "eager" or winner in builders
        else None
    )


def run_trial(
    trial: ModuleTrial,
    contenders: Mapping[str, Call],
    choices: tuple[Choice, ...],
    context: TuneContext,
) -> EndToEndDecision:
    """The whole call, in this process: a contender stays only if it beats the module's own forward.
    The cache remembers.
    """
    key, comparison = choices[0].region.key, ""
    # What the trial writes and draws is put back, so that the user's program runs on as without it.
    with trial.arguments(context.device) as (args, kwargs):

        def benchmark(call: Call) -> PairedSummary:
            return trial.time_against_forward(call, args, kwargs, context)

        notes, winners = select_faster(
            contenders, benchmark, key, swapped=any(choice.swapped for choice in choices)
        )
        winner = winners[0] if winners else "eager"
        if len(winners) > 1:
            # Both ratios are to a slower forward and were taken one after the other. They say
            # little of each other, so both contenders are paired.
            a, b = winners
            result = trial.time_against_each_other(
                contenders[a], contenders[b], args, kwargs, context
            )
            telemetry.record(
                "judge", "end_to_end", key, contender=b, over=a, **list_summary_facts(result)
            )
            comparison = f"; {b} is {format_speedup(result)} of {a}"
            winner = b if result.speedup > 1.0 else a
    # `explain` recognises by this word what was taken back.
    undone = "undone: " if winner == "eager" else ""
    note = f"{undone}end to end {', '.join(notes)} of the module's own forward{comparison}"
    note += f"; {TORCH_COMPILE} runs" if winner == TORCH_COMPILE else ""
    remember_decision(winner, note, choices, context)
    return EndToEndDecision(winner, note, contenders.get(winner))


def remember_decision(
    winner: str, note: str, choices: tuple[Choice, ...], context: TuneContext
) -> None:
    """Keep for later processes what won end to end."""
    record = {
        "winner": winner,
        "note": note,
        # The digests bind the record to the kernels that were measured.
        "candidates": [choice.candidate.digest for choice in choices],
    }
    context.cache.put_decision_record(
        make_end_to_end_name(choices), record, context.target, context.contract
    )
