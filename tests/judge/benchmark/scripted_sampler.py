"""Samplers that answer scripted ratios, and callables of known duration."""

from __future__ import annotations

import time

from torch_cudal1.judge.benchmark.timing import (
    L2,
    SampleBatch,
    WarmCosts,
)
from torch_cudal1.judge.benchmark.timing_plan import TIMING_PLANS

FAST = TIMING_PLANS["fast"]


def sleep_2_ms() -> None:
    time.sleep(2e-3)


def sleep_half_ms() -> None:
    time.sleep(0.5e-3)


def make_costs(call_us: float, flushed_us: float | None = None) -> WarmCosts:
    return WarmCosts(call_us, call_us, call_us if flushed_us is None else flushed_us)


class ScriptedSampler:
    """A sampler that answers from a list of ratios and counts what it was asked for."""

    temperatures: tuple[L2, ...] = ("cold", "hot")

    def __init__(self, ratios: dict[str, list[float]]) -> None:
        self.ratios = {l2: iter(values) for l2, values in ratios.items()}
        self.requested_pairs: dict[str, int] = dict.fromkeys(ratios, 0)

    def warm_up(self) -> tuple[WarmCosts, WarmCosts]:
        return make_costs(100.0), make_costs(100.0)

    def take_samples(self, batch: SampleBatch) -> list[tuple[float, float]]:
        self.requested_pairs[batch.l2] += batch.pairs
        ratio = next(self.ratios[batch.l2])
        return [(100.0 * ratio, 100.0)] * batch.pairs
