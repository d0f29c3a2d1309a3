"""Sampling that is on record: draw, write into the journal, measure, write into the database, in
this order.

Asked again for a batch that is on record it answers from there, token by token and score by score;
so every stage that samples through it goes on after a kill as if nothing had happened. It learns
nothing and chooses no exemplars.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_cudal1.ingest.llm.appraise import Appraiser, Asked
from torch_cudal1.ingest.llm.database import View, digest
from torch_cudal1.ingest.llm.journal import Journal
from torch_cudal1.ingest.llm.policy import Rollout, Writer
from torch_cudal1.ingest.llm.records import Exemplar, Policy
from torch_cudal1.judge.pool.measured import Measured, TrainingTask

__all__ = ["Chance", "Recorder", "Ruled", "Sampled", "Shown", "facts_of", "turn"]


@dataclass(frozen=True)
class Shown:
    """A task with what its prompt shows of earlier work."""

    task: TrainingTask
    exemplars: tuple[Exemplar, ...] = ()


@dataclass(frozen=True)
class Sampled:
    """A batch: what was shown, the completions as tensors, and what became of each; members of a
    prompt next to each other.
    """

    shown: Sequence[Shown]
    rollout: Rollout
    measured: Sequence[Measured]


@dataclass(frozen=True)
class Recorder:
    """`stage`: the first part of every key and sample name. `seed`: of all sampling; a key's
    samples follow from both.
    """

    appraiser: Appraiser
    tasks: Sequence[TrainingTask]
    journal: Journal
    stage: str
    seed: int

    def view(self) -> View:
        """The programs that prompts may show now."""
        return self.appraiser.database.view()

    def sampled(
        self, writer: Writer, key: str, drawn: Sequence[Shown], *, count: int, temperature: float
    ) -> Sampled:
        """`count` completions for each of `drawn`, measured and committed; or what is on record
        under this key.
        """
        key = f"{self.stage}/{key}"
        shown, rollout = self._rolled_out(writer, key, drawn, count, temperature)
        asked = []
        for i, text in enumerate(writer.texts(rollout)):
            one = shown[i // count]
            digests = tuple(digest(exemplar.program) for exemplar in one.exemplars)
            asked.append(Asked(self.name(key, i, count), one.task, text, self.stage, digests))
        measured = self.appraiser.appraise(asked)
        self.appraiser.database.settle()
        return Sampled(shown, rollout, measured)

    def on_record(self, key: str, *, prompts: int, count: int) -> list[Measured]:
        """What became of the samples of a key, without those that were never measured."""
        database = self.appraiser.database
        samples = [
            database.get(self.name(f"{self.stage}/{key}", i, count)) for i in range(prompts * count)
        ]
        return [sample.measured for sample in samples if sample is not None]

    @staticmethod
    def name(key: str, index: int, count: int) -> str:
        """Of the sample at that place: key, prompt, member."""
        return f"{key}/{index // count}/{index % count}"

    def _rolled_out(
        self, writer: Writer, key: str, drawn: Sequence[Shown], count: int, temperature: float
    ) -> tuple[Sequence[Shown], Rollout]:
        codec, known = self.appraiser.codec, self.journal.get(key)
        if known is not None:
            tasks = {task.id: task for task in self.tasks}
            shown = [
                Shown(tasks[one["task"]], tuple(Exemplar(p, s) for p, s in one["exemplars"]))
                for one in known["groups"]
            ]
            return shown, writer.rebuilt(
                [codec.prompt(one.task, one.exemplars) for one in shown], known["ids"]
            )
        prompts = [codec.prompt(one.task, one.exemplars) for one in drawn]
        seed = int(digest(f"{self.seed}:{key}"), 16) % (1 << 62)
        rollout = writer.rollout(prompts, count=count, temperature=temperature, seed=seed)
        groups = [
            {"task": one.task.id, "exemplars": [[e.program, e.score] for e in one.exemplars]}
            for one in drawn
        ]
        ids = [
            row[: int(mask.sum())].tolist()
            for row, mask in zip(rollout.ids, rollout.mask, strict=True)
        ]
        self.journal.add(
            key, {"groups": groups, "ids": ids, "view": self.appraiser.database.generation}
        )
        return drawn, rollout


class Chance(Recorder):
    """Programs drawn uniformly from all honest ones of a task, whatever is shown and whoever
    writes: what any policy must beat.
    """

    def one(self, task: TrainingTask, attempt: int) -> str:
        """The program of that attempt."""
        codec: Any = self.appraiser.codec
        listed = [program.text for program in codec.programs(task) if not program.hack]
        return str(random.Random(f"{self.seed}/{self.stage}/{task.id}/{attempt}").choice(listed))

    def sampled(
        self, writer: Writer, key: str, drawn: Sequence[Shown], *, count: int, temperature: float
    ) -> Sampled:
        """As many programs; there are no tokens to learn from."""
        asked = [
            Asked(
                self.name(f"{self.stage}/{key}", i, count),
                shown.task,
                self.one(shown.task, int(digest(f"{key}/{i}"), 16)),
                "chance",
            )
            for i, shown in enumerate(one for one in drawn for _ in range(count))
        ]
        measured = self.appraiser.appraise(asked)
        self.appraiser.database.settle()
        empty = torch.zeros(len(asked), 1, dtype=torch.long)
        return Sampled(drawn, Rollout(empty, empty, empty, empty), measured)


@dataclass(frozen=True)
class Ruled(Recorder):
    """A policy without weights writes, whoever else could: hill climbing, where it changes the best
    program that it is shown.
    """

    policy: Policy | None = None

    def sampled(
        self, writer: Writer, key: str, drawn: Sequence[Shown], *, count: int, temperature: float
    ) -> Sampled:
        """Completions of the policy; there are no tokens to learn from."""
        if self.policy is None:
            raise ValueError("expected a policy that writes")
        prompts = [self.appraiser.codec.prompt(one.task, one.exemplars) for one in drawn]
        seed = int(digest(f"{self.seed}/{self.stage}/{key}"), 16)
        texts = self.policy.sample(prompts, count=count, temperature=temperature, seed=seed)
        asked = [
            Asked(
                self.name(f"{self.stage}/{key}", i * count + j, count),
                one.task,
                text,
                self.policy.name,
            )
            for i, (one, group) in enumerate(zip(drawn, texts, strict=True))
            for j, text in enumerate(group)
        ]
        measured = self.appraiser.appraise(asked)
        self.appraiser.database.settle()
        empty = torch.zeros(len(asked), 1, dtype=torch.long)
        return Sampled(drawn, Rollout(empty, empty, empty, empty), measured)


def facts_of(found: Sequence[Measured]) -> Mapping[str, float]:
    """What a log says of a batch of measurements: shares of outcomes, mean speed-up (failures 0),
    mean of the successes.
    """
    scores = [one.score for one in found if one.score is not None]
    return {
        "success": len(scores) / len(found),
        "hack": sum(one.outcome == "hack" for one in found) / len(found),
        "undecodable": sum(one.outcome == "undecodable" for one in found) / len(found),
        "speedup": sum(scores) / len(found),
        "speedup_of_successes": statistics.fmean(scores) if scores else 0.0,
    }


def turn(tasks: Sequence[TrainingTask], count: int, step: int, seed: int) -> list[TrainingTask]:
    """The tasks of a step: every task once before any comes again, in an order that each round
    draws anew. A pure function.
    """
    wanted = []
    for position in range(step * count, (step + 1) * count):
        done, place = divmod(position, len(tasks))
        order = list(range(len(tasks)))
        random.Random(seed * 7_919 + done).shuffle(order)
        wanted.append(tasks[order[place]])
    return wanted
