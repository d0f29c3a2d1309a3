"""A small experiment in the synthetic world."""

from __future__ import annotations

from dataclasses import replace

from tests.training.world import TASKS, Rules, SyntheticCodec, SyntheticEvaluator
from torch_cudal1.ingest.llm.policy import TinySpec
from torch_cudal1.training.environment import Environment
from torch_cudal1.training.experiments.plan import ExperimentPlan, HeldOut
from torch_cudal1.training.grpo import GrpoConfig
from torch_cudal1.training.stages import CollectConfig, SelfsupConfig
from torch_cudal1.training.supervised import FitConfig

FIT = FitConfig(steps=20, batch=8, learning_rate=5e-3)


PLAN = ExperimentPlan(
    name="small",
    device="cpu",
    endpoint="none: a test",
    arms=("A0", "A4", "A6"),
    seeds=(0, 1),
    budget=20,
    max_new_tokens=4,
    model=TinySpec(hidden=32, layers=1, heads=2, context=64),
    collect=CollectConfig(attempts=4),
    sft=FIT,
    selfsup=SelfsupConfig(rounds=1, samples=4, fit=replace(FIT, steps=5)),
    rl=GrpoConfig(steps=4, group=4, groups=2, epochs=1, save_every=1),
    held_out=HeldOut(measurements=6, cap=16, round=4, reported=(1, 4, 6)),
)


def make_environment(
    plan: ExperimentPlan = PLAN, seed: int = 0, evaluator: SyntheticEvaluator | None = None
) -> Environment:
    generators = [Rules("one", ["a0 b0", "a1 b3", "a2 b2"]), Rules("two", ["a3 b1", "a2 b0"])]
    held_out = {"shape": TASKS[4:5], "family": TASKS[5:]}
    return Environment(
        "synthetic",
        SyntheticCodec(),
        evaluator or SyntheticEvaluator(),
        generators,
        TASKS[:4],
        held_out,
    )
