"""Samples a policy and records it in this order: draw, write to the journal, measure, write to the
database.

A batch that is on record is answered from there, token by token and score by score. Every stage
that samples through a recorder therefore goes on after a kill as if it had not been interrupted. A
recorder does not train and does not choose exemplars.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_cudal1.ingest.llm.appraise import Appraiser, NamedCompletion
from torch_cudal1.ingest.llm.database import DatabaseView, digest
from torch_cudal1.ingest.llm.journal import SampleJournal
from torch_cudal1.ingest.llm.policy import LanguageModel, Rollout
from torch_cudal1.ingest.llm.records import Exemplar, Policy
from torch_cudal1.judge.pool.measured import Measured, TrainingTask

__all__ = [
    "Recorder",
    "RolloutBatch",
    "RuleRecorder",
    "TaskPrompt",
    "UniformRecorder",
    "choose_tasks",
    "summarize_outcomes",
]


@dataclass(frozen=True)
class TaskPrompt:
    """A task and the exemplars that its prompt shows."""

    task: TrainingTask
    exemplars: tuple[Exemplar, ...] = ()


@dataclass(frozen=True)
class RolloutBatch:
    """Prompts, their completions as tensors, and a measurement of each completion. Completions of
    one prompt are next to each other.
    """

    prompts: Sequence[TaskPrompt]
    rollout: Rollout
    measurements: Sequence[Measured]


@dataclass(frozen=True)
class Recorder:
    """Samples, measures and records. `stage`: the first part of every journal key and sample name.
    `seed`: of all sampling; a batch follows from its key and the seed.
    """

    appraiser: Appraiser
    tasks: Sequence[TrainingTask]
    journal: SampleJournal
    stage: str
    seed: int

    def view(self) -> DatabaseView:
        """The programs that prompts may show now."""
        return self.appraiser.database.view()

    def sample(
        self,
        writer: LanguageModel,
        key: str,
        prompts: Sequence[TaskPrompt],
        *,
        count: int,
        temperature: float,
    ) -> RolloutBatch:
        """`count` completions for each prompt, measured and committed; or the batch that is on
        record under this key.
        """
        # The stage is part of the key: stages share one database, and their steps have the same
        # numbers.
        key = f"{self.stage}/{key}"
        # The prompts of the record win over the caller's: after a kill the database has grown, and
        # a new draw of exemplars would not be what the recorded completions have seen.
        prompts, rollout = self._roll_out(writer, key, prompts, count, temperature)
        requests = []
        for i, completion in enumerate(writer.texts(rollout)):
            # Completions of one prompt are next to each other.
            prompt = prompts[i // count]
            digests = tuple(digest(exemplar.program) for exemplar in prompt.exemplars)
            requests.append(
                NamedCompletion(
                    self.name_sample(key, i, count), prompt.task, completion, self.stage, digests
                )
            )
        # A name that the database knows is answered from there; only the rest of an interrupted
        # batch is measured.
        measurements = self.appraiser.appraise(requests)
        # Committed after the whole batch: the next view holds all of a step or nothing of it.
        # `settle`, not `commit`: a batch taken from the record has nothing pending and must not
        # make a generation.
        self.appraiser.database.settle()
        return RolloutBatch(prompts, rollout, measurements)

    def read_measurements(self, key: str, *, prompts: int, count: int) -> list[Measured]:
        """The measurements on record under a key; samples that were never measured are left out."""
        database = self.appraiser.database
        samples = [
            database.get(self.name_sample(f"{self.stage}/{key}", i, count))
            for i in range(prompts * count)
        ]
        # A batch that was killed between journal and database has completions without a
        # measurement.
        return [sample.measured for sample in samples if sample is not None]

    @staticmethod
    def name_sample(key: str, index: int, count: int) -> str:
        """The name of the sample at a place in the batch: key, prompt and member."""
        return f"{key}/{index // count}/{index % count}"

    def _roll_out(
        self,
        writer: LanguageModel,
        key: str,
        prompts: Sequence[TaskPrompt],
        count: int,
        temperature: float,
    ) -> tuple[Sequence[TaskPrompt], Rollout]:
        codec, record = self.appraiser.codec, self.journal.get(key)
        if record is not None:
            # The journal holds ids; a task that is not in this run any more raises KeyError here.
            tasks = {task.id: task for task in self.tasks}
            recorded_prompts = [
                TaskPrompt(
                    tasks[group["task"]], tuple(Exemplar(p, s) for p, s in group["exemplars"])
                )
                for group in record["groups"]
            ]
            texts = [codec.prompt(prompt.task, prompt.exemplars) for prompt in recorded_prompts]
            # From token ids, not from text: a tokenizer need not encode a decoded text into the
            # same tokens, and log-probabilities must be of the tokens that were sampled.
            return recorded_prompts, writer.rebuilt(texts, record["ids"])
        texts = [codec.prompt(prompt.task, prompt.exemplars) for prompt in prompts]
        # A digest, since Python salts `hash` of a string anew in each process. torch's
        # `manual_seed` takes 64-bit integers, so the digest is cut to what fits.
        seed = int(digest(f"{self.seed}:{key}"), 16) % (1 << 62)
        rollout = writer.rollout(texts, count=count, temperature=temperature, seed=seed)
        groups = [
            {
                "task": prompt.task.id,
                "exemplars": [[exemplar.program, exemplar.score] for exemplar in prompt.exemplars],
            }
            for prompt in prompts
        ]
        ids = [
            # Without padding; the mask counts the end token, which was sampled too.
            row[: int(mask.sum())].tolist()
            for row, mask in zip(rollout.ids, rollout.mask, strict=True)
        ]
        # Written before anything is measured. In the other order a kill could leave measurements in
        # the database of completions that are sampled anew, and differently, when the run goes on.
        self.journal.add(
            key, {"groups": groups, "ids": ids, "view": self.appraiser.database.generation}
        )
        return prompts, rollout


class UniformRecorder(Recorder):
    """Draws programs uniformly from all honest ones of a task, whatever the prompt shows: the
    baseline that a policy must beat.
    """

    def draw_program(self, task: TrainingTask, attempt: int) -> str:
        """The program of an attempt; the same for the same seed, stage, task and attempt."""
        codec: Any = self.appraiser.codec
        # Cheats are left out: the baseline is a search among honest programs.
        programs = [program.text for program in codec.programs(task) if not program.hack]
        # `random.Random` of a string hashes it with SHA-512, so the draw is the same in every
        # process.
        return str(random.Random(f"{self.seed}/{self.stage}/{task.id}/{attempt}").choice(programs))

    def sample(
        self,
        writer: LanguageModel,
        key: str,
        prompts: Sequence[TaskPrompt],
        *,
        count: int,
        temperature: float,
    ) -> RolloutBatch:
        """`count` programs for each prompt; the rollout is empty, as there are no tokens."""
        # The same layout as a model's batch, so that callers slice groups the same way.
        repeated_prompts = [prompt for prompt in prompts for _ in range(count)]
        requests = [
            NamedCompletion(
                self.name_sample(f"{self.stage}/{key}", i, count),
                prompt.task,
                self.draw_program(prompt.task, int(digest(f"{key}/{i}"), 16)),
                "chance",
            )
            for i, prompt in enumerate(repeated_prompts)
        ]
        measurements = self.appraiser.appraise(requests)
        self.appraiser.database.settle()
        return RolloutBatch(prompts, _make_empty_rollout(len(requests)), measurements)


@dataclass(frozen=True)
class RuleRecorder(Recorder):
    """Lets a policy without weights write instead of the model: hill climbing, which changes the
    best program that its prompt shows.
    """

    policy: Policy | None = None

    def sample(
        self,
        writer: LanguageModel,
        key: str,
        prompts: Sequence[TaskPrompt],
        *,
        count: int,
        temperature: float,
    ) -> RolloutBatch:
        """Completions of the policy; the rollout is empty, as there are no tokens."""
        if self.policy is None:
            raise ValueError("expected a policy that writes")
        texts = [self.appraiser.codec.prompt(prompt.task, prompt.exemplars) for prompt in prompts]
        seed = int(digest(f"{self.seed}/{self.stage}/{key}"), 16)
        completions = self.policy.sample(texts, count=count, temperature=temperature, seed=seed)
        requests = [
            NamedCompletion(
                self.name_sample(f"{self.stage}/{key}", i * count + j, count),
                prompt.task,
                completion,
                self.policy.name,
            )
            for i, (prompt, group) in enumerate(zip(prompts, completions, strict=True))
            for j, completion in enumerate(group)
        ]
        measurements = self.appraiser.appraise(requests)
        self.appraiser.database.settle()
        return RolloutBatch(prompts, _make_empty_rollout(len(requests)), measurements)


def summarize_outcomes(measurements: Sequence[Measured]) -> Mapping[str, float]:
    """Metrics of a batch for a log: shares of outcomes, mean speed-up with failures as 0, mean of
    the successes alone.
    """
    scores = [measurement.score for measurement in measurements if measurement.score is not None]
    outcomes = [measurement.outcome for measurement in measurements]
    return {
        # All shares are of all samples. A mean over successes alone rises when slow programs begin
        # to fail, so both means are reported.
        "success": len(scores) / len(measurements),
        "hack": outcomes.count("hack") / len(measurements),
        "undecodable": outcomes.count("undecodable") / len(measurements),
        "speedup": sum(scores) / len(measurements),
        "speedup_of_successes": statistics.fmean(scores) if scores else 0.0,
    }


def choose_tasks(
    tasks: Sequence[TrainingTask], count: int, step: int, seed: int
) -> list[TrainingTask]:
    """Choose the tasks of a step. Every task comes once before any comes again, in an order that
    each epoch draws anew. A pure function.
    """
    chosen = []
    for position in range(step * count, (step + 1) * count):
        # A step may reach into the next epoch: no task is left out where the count does not divide
        # the tasks.
        epoch, place = divmod(position, len(tasks))
        order = list(range(len(tasks)))
        # From seed and epoch alone: arms of a seed train on the same tasks in the same order, and a
        # resumed run needs no state. The prime keeps the epochs of neighbouring seeds apart.
        random.Random(seed * 7_919 + epoch).shuffle(order)
        chosen.append(tasks[order[place]])
    return chosen


def _make_empty_rollout(size: int) -> Rollout:
    # One column, since tensors without one break reductions over tokens; the mask of zeros says
    # that none of them counts.
    empty = torch.zeros(size, 1, dtype=torch.long)
    return Rollout(empty, empty, empty, empty)
