"""`cudal1 plan --compare`: what TARGETs cost per call on each GPU type that the cache knows.

With a recording, the calls that production made of these modules count as often as they were made;
without one, every TARGET counts the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torch_cudal1.api.gpu_comparison import (
    GpuComparison,
    GpuPrices,
    HardwareRow,
    Load,
    compare,
    read_prices,
)
from torch_cudal1.api.recording.replay import (
    enter_recorded_modes,
    list_recorded_calls,
    read_recording,
)
from torch_cudal1.api.targets import LoadedTarget
from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.terminal import Screen
from torch_cudal1.core.errors import NotLowerableError, TargetError
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.records import Entry
from torch_cudal1.store.cache.local_cache import EntryFile
from torch_cudal1.store.context import cache_for
from torch_cudal1.store.recording_file import RecordingContents
from torch_cudal1.store.trust.trust_policy import Forbidden

__all__ = ["compare_targets", "show_comparison"]


def compare_targets(
    args: argparse.Namespace,
    targets: Iterable[LoadedTarget],
    settings: Settings,
    failed: list[TargetError],
) -> GpuComparison:
    """The comparison of targets; one that cannot be captured joins `failed`.

    Raises SettingError for bad prices, TargetError for a recording that cannot be read.
    """
    # Bad prices are reported before a model is loaded.
    prices = read_prices(args.prices) if args.prices is not None else GpuPrices()
    recording = read_recording(args.recorded) if args.recorded is not None else None
    loads: list[Load] = []
    for loaded in targets:
        try:
            loads += (
                [_load(loaded)] if recording is None else _loads_of_recording(loaded, recording)
            )
        # One target that cannot be used must not cost the answer for the others.
        except TargetError as error:
            failed.append(error)
    return (
        compare(loads, _read_decisions(settings), prices)
        if loads
        else GpuComparison(workload=(), rows=())
    )


def show_comparison(screen: Screen, comparison: GpuComparison) -> None:
    """A row a GPU type, then what is missing."""
    for workload_line in comparison.workload:
        screen.line(workload_line)
    # Only decisions made on a GPU count; a cache filled on a CPU has none.
    if not comparison.rows:
        screen.line(
            "the cache holds no decision that was made on a GPU: run `cudal1 warmup` on each type, and bring the folders here"
        )
        return
    money = f"{comparison.currency or 'price'} per million calls"
    columns = ("GPU", "time per call", "gain there", "decided", money, "kWh per million calls")
    screen.table(columns, [_cells(row) for row in comparison.rows])
    for row in comparison.rows:
        # A row without a time says what would give it one.
        for sentence in row.missing:
            screen.line(f"missing for {row.hardware}: {sentence}")


def _load(loaded: LoadedTarget) -> Load:
    try:
        with torch.no_grad():
            # Without gradients, as a server runs it.
            return Load(loaded.name, capture_regions(loaded.module, loaded.inputs))
    except NotLowerableError as error:
        raise _capture_error(loaded, error) from error


def _loads_of_recording(loaded: LoadedTarget, recording: RecordingContents) -> list[Load]:
    """The recorded calls of this target, each at its form and in its modes. Raises TargetError if
    there are none.
    """
    loads = []
    for call in list_recorded_calls(loaded, recording):
        # A recorded call that cannot be made would be missing from the weights without a word.
        if call.problem:
            raise TargetError(call.loaded.name, call.problem)
        # Inputs are a dict by name, or a tuple by position.
        inputs: Any = call.loaded.inputs
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        try:
            # Autocast, train mode and gradients change the graph, and with it the key that is
            # looked up.
            with enter_recorded_modes(call), torch.set_grad_enabled(call.mode.grad):
                loads.append(
                    Load(
                        call.loaded.name,
                        capture_regions(call.loaded.module, args, kwargs),
                        call.calls,
                    )
                )
        except NotLowerableError as error:
            raise TargetError(
                call.loaded.name,
                f"it cannot be captured, so no decision can be looked up ({error.reason})",
            ) from error
    return loads


def _capture_error(loaded: LoadedTarget, error: NotLowerableError) -> TargetError:
    return TargetError(
        loaded.name, f"it cannot be captured, so no decision can be looked up ({error.reason})"
    )


def _read_decisions(settings: Settings) -> Iterator[Entry]:
    """Decisions under the contract in force, revoked ones left out. Unsigned evidence
    is used: nothing is run.
    """
    for file in cache_for(settings).iter_entries():
        # A revoked kernel's time is no time that a deployment will have.
        if isinstance(file, EntryFile) and not isinstance(file.standing, Forbidden):
            contract = file.entry.contract
            # A decision under another contract may use kernels that this one does not allow.
            if (contract.precision, contract.assume_finite) == (
                settings.precision,
                settings.assume_finite,
            ):
                yield file.entry


def _cells(row: HardwareRow) -> list[str]:
    return [
        row.hardware,
        text.latency(row.us_per_call),
        text.speedup(row.gain),
        f"{row.share_decided:.0%}",
        text.ABSENT if row.cost_per_million is None else f"{row.cost_per_million:.4g}",
        text.ABSENT if row.kwh_per_million is None else f"{row.kwh_per_million:.4g}",
    ]
