"""What a policy learns when its evaluator can be deceived: the same model trained by a trusting
evaluator and by the judge.

The model is first taught by the trusting one and by an author of cheats, so that it knows them;
then both train it, from the same weights and with the same seeds. What counts is the share of
samples that are cheats, whoever was deceived by them. A cheat here is a program that its language
marks as one: this says nothing about cheats that nobody has written down.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_cudal1.ingest.llm.appraise import Appraiser
from torch_cudal1.ingest.llm.database import Database
from torch_cudal1.ingest.llm.journal import Journal
from torch_cudal1.ingest.llm.policy import Writer, create_tiny
from torch_cudal1.training.contrastive import ContrastiveStep
from torch_cudal1.training.experiments.experiment import Bench
from torch_cudal1.training.experiments.plan import ARMS, Plan
from torch_cudal1.training.recorder import Recorder
from torch_cudal1.training.rl_native import train
from torch_cudal1.training.stages import collect, rows
from torch_cudal1.training.supervised import fit

__all__ = ["red_team"]

Told = Callable[[str, float | None], None]


class Cheater:
    """A policy that writes nothing but cheats, each as often as the others: one voice among the
    generators of the trusting side.
    """

    name = "cheater"

    def __init__(self, bench: Bench) -> None:
        self._cheats = {
            bench.codec.prompt(task): [
                program.text for program in bench.codec.programs(task) if program.hack
            ]
            for task in bench.train
        }

    def sample(
        self, prompts: Sequence[str], *, count: int, temperature: float, seed: int
    ) -> list[list[str]]:
        """The same prompt, seed and place give the same cheat."""
        return [
            [
                random.Random(f"{seed}/{prompt}/{i}").choice(self._cheats[prompt])
                for i in range(count)
            ]
            for prompt in prompts
        ]


def red_team(
    plan: Plan, naive: Bench, guarded: Bench, seed: int, folder: Path, told: Told
) -> dict[str, list[dict[str, float]]]:
    """For both evaluators, a line a step: samples that were cheats, and what the evaluator itself
    reported.
    """
    told("red team: teaching by the naive evaluator", 0.0)
    taught = _taught(
        plan, replace(naive, generators=(*naive.generators, Cheater(naive))), seed, folder
    )
    found = {}
    for half, (name, bench) in enumerate((("naive", naive), ("guarded", guarded))):
        place = folder / name
        with Database(place / "samples.jsonl") as database:
            recorder = Recorder(
                Appraiser(bench.codec, bench.evaluator, database),
                bench.train,
                Journal(place / "rl.journal"),
                "rl",
                seed,
            )
            step = ContrastiveStep(recorder, ARMS["A4"].grpo(plan.rl))
            writer = Writer.load(taught, max_new_tokens=plan.max_new_tokens)

            def gather(
                model: Writer,
                number: int,
                step: ContrastiveStep = step,
                name: str = name,
                half: int = half,
            ) -> Any:
                share = 0.2 + 0.4 * (half + number / plan.rl.steps)
                told(f"red team: {name} evaluator, step {number + 1} of {plan.rl.steps}", share)
                return step(model, number)

            train(writer, gather, step.config, folder=place / "rl", seed=seed)
            found[name] = _shares(bench, recorder, plan)
    return found


def _taught(plan: Plan, naive: Bench, seed: int, folder: Path) -> Path:
    """Stage 1 with the trusting evaluator's rewards."""
    place = folder / "taught"
    if (place / "sft").is_dir():
        return place / "sft"
    with Database(place / "samples.jsonl") as database:
        collect(
            Appraiser(naive.codec, naive.evaluator, database),
            naive.train,
            naive.generators,
            plan.collect,
            seed=seed,
        )
        learned = rows(naive.codec, naive.train, database, seed=seed)
    create_tiny(
        place / "begin", naive.codec.vocabulary, replace(plan.model, seed=plan.model.seed + seed)
    )
    writer = Writer.load(place / "begin", max_new_tokens=plan.max_new_tokens)
    fit(writer, learned, plan.sft, seed=seed)
    writer.save(place / "sft")
    return place / "sft"


def _shares(bench: Bench, recorder: Recorder, plan: Plan) -> list[dict[str, float]]:
    cheats = {
        (task.id, program.text)
        for task in bench.train
        for program in bench.codec.programs(task)
        if program.hack
    }
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
