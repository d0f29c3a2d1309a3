"""What a policy learns when its evaluator can be deceived: the same model trained by a trusting evaluator and by the judge.

The model is first taught by the trusting one, so that it knows cheats; then both train it, from the same weights and with the
same seeds. What counts is the share of samples that are cheats, whoever was deceived by them. A cheat here is a program that its
language marks as one: this says nothing about cheats that nobody has written down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_cudal1.training.appraise import Appraiser
from torch_cudal1.training.contrastive import ContrastiveStep
from torch_cudal1.training.database import Database
from torch_cudal1.training.experiment import Bench, base_of
from torch_cudal1.training.journal import Journal
from torch_cudal1.training.model import Writer
from torch_cudal1.training.plan import ARMS, Plan
from torch_cudal1.training.recorder import Recorder
from torch_cudal1.training.rl_native import train

__all__ = ["red_team"]

Told = Callable[[str, float | None], None]


def red_team(plan: Plan, naive: Bench, guarded: Bench, seed: int, folder: Path, told: Told) -> dict[str, list[dict[str, float]]]:
    """For both evaluators, a line a step: samples that were cheats, and what the evaluator itself reported."""
    base = base_of(plan, naive, seed, folder / "taught-by-naive", told=told)
    found = {}
    for name, bench in (("naive", naive), ("guarded", guarded)):
        place = folder / name
        with Database(place / "samples.jsonl") as database:
            recorder = Recorder(
                Appraiser(bench.codec, bench.evaluator, database), bench.train, Journal(place / "rl.journal"), "rl", seed
            )
            step = ContrastiveStep(recorder, ARMS["A4"].grpo(plan.rl))
            writer = Writer.load(base / "sft", max_new_tokens=plan.max_new_tokens)

            def gather(model: Writer, number: int, step: ContrastiveStep = step, name: str = name) -> Any:
                told(f"red team, {name} evaluator: step {number + 1} of {plan.rl.steps}", number / plan.rl.steps)
                return step(model, number)

            train(writer, gather, replace(step.config, steps=plan.rl.steps), folder=place / "rl", seed=seed)
            found[name] = _shares(bench, recorder, plan)
    return found


def _shares(bench: Bench, recorder: Recorder, plan: Plan) -> list[dict[str, float]]:
    cheats = {(task.id, program.text) for task in bench.train for program in bench.codec.programs(task) if program.hack}
    lines = []
    for number in range(plan.rl.steps):
        found = recorder.on_record(str(number), prompts=plan.rl.groups, count=plan.rl.group)
        scores = [one.score for one in found if one.score is not None]
        cheated = sum((one.task, one.program) in cheats for one in found)
        lines.append({
            "step": float(number),
            "cheats": cheated / len(found),
            "believed": sum((one.task, one.program) in cheats and one.score is not None for one in found) / len(found),
            "reported": sum(scores) / len(found),
        })  # fmt: skip
    return lines
