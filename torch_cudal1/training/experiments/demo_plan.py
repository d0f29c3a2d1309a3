"""The plan of `cudal1 train demo`: everything, small. Two seeds settle nothing: it shows that the
parts work, not their worth.
"""

from torch_cudal1.ingest.llm.policy import TinySpec
from torch_cudal1.training.experiments.plan import ExperimentPlan, HeldOut
from torch_cudal1.training.grpo import GrpoConfig
from torch_cudal1.training.stages import SelfsupConfig
from torch_cudal1.training.supervised import FitConfig

__all__ = ["DEMO"]

DEMO = ExperimentPlan(
    name="demonstration",
    device="cpu",
    endpoint="A model of 0.15 M parameters, made from nothing and taught in three stages, in minutes on a CPU; a demonstration.",
    arms=("A0", "A2", "A4", "A6"),
    seeds=(0, 1),
    # Sizes for minutes on a CPU. The page says that two seeds settle nothing.
    budget=300,
    max_new_tokens=24,
    model=TinySpec(hidden=64, layers=2, heads=4, context=160),
    sft=FitConfig(steps=250, learning_rate=2e-3),
    selfsup=SelfsupConfig(rounds=3, samples=8, fit=FitConfig(steps=60, learning_rate=5e-4)),
    rl=GrpoConfig(steps=30, learning_rate=5e-4, save_every=10),
    held_out=HeldOut(measurements=16, cap=48, round=4, reported=(1, 4, 16)),
)
