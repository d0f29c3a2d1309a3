"""The stages before reinforcement learning: collect successes of several generators, learn from
them, learn from one's own.

    collect   every (task, generator): up to 20 attempts, until 2 successes; all attempts on record  (CUDA-L1, section 2.2)
    rows      the successes as prompts and answers, plain and with two exemplars
    selfsup   sample, measure, train on what succeeded, again: no baseline, no negative updates      (section 2.3)

Speed is looked at by none of them. A stage that was killed goes on from what is on record.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch_cudal1.core.errors import Cudal1Error, TargetError
from torch_cudal1.ingest.llm.appraise import Appraiser, Asked
from torch_cudal1.ingest.llm.database import Database
from torch_cudal1.ingest.llm.policy import Writer, recovered, replaced
from torch_cudal1.ingest.llm.records import Codec, Exemplar, Policy
from torch_cudal1.judge.pool.measured import Measured, TrainingTask
from torch_cudal1.training.recorder import Recorder, Shown, facts_of
from torch_cudal1.training.supervised import FitConfig, Row, fit

__all__ = [
    "CollectConfig",
    "RowConfig",
    "SelfsupConfig",
    "TeachingCodec",
    "collect",
    "collected",
    "rows",
    "selfsup",
]

Told = Callable[[str, float], None]  # what is being done, fraction done


class TeachingCodec(Codec, Protocol):
    """A codec that can also write the answer that a model is to learn."""

    def completion(
        self,
        task: TrainingTask,
        program: str,
        exemplars: Sequence[Exemplar] = (),
        *,
        analysis: bool = True,
    ) -> str:
        """The completion that `decode` reads as this program; `analysis`: with what is to be said
        about the exemplars first.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """The paper's numbers."""

    attempts: int = 20
    wanted: int = 2
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RowConfig:
    """`improver`: the best of three programs answers the other two. `analysis`: what is said about
    exemplars comes first.
    """

    improver: bool = False
    analysis: bool = True


@dataclass(frozen=True, kw_only=True)
class SelfsupConfig:
    """The paper names no numbers. `samples`: completions of each task a round."""

    rounds: int = 3
    samples: int = 4
    temperature: float = 1.0
    fit: FitConfig = field(default_factory=lambda: FitConfig(steps=100, learning_rate=3e-4))


def collect(
    appraiser: Appraiser, tasks: Sequence[TrainingTask], generators: Sequence[Policy], config: CollectConfig, *, seed: int,
    told: Told = lambda what, fraction: None,
) -> list[str]:  # fmt: skip
    """Ask every generator for every task. What went wrong beside failing programs, such as an
    endpoint that is down: one line each.

    A generator that raises for a task is asked no more about it, and goes on with the others;
    nobody is asked about a task any more whose reference cannot be judged.
    """
    problems: list[str] = []
    broken: set[str] = set()
    for place, generator in enumerate(generators):
        given_up: set[str] = set()
        for attempt in range(config.attempts):
            told(
                f"collect: {generator.name}, attempt {attempt + 1}",
                (place + attempt / config.attempts) / len(generators),
            )
            done = _successes(appraiser.database, generator.name)
            open_ = [
                t
                for t in tasks
                if len(done.get(t.id, ())) < config.wanted and t.id not in given_up | broken
            ]
            fresh = [
                t for t in open_ if not appraiser.database.has(_attempt(generator.name, t, attempt))
            ]
            asked = []
            for task, completion in _completions(
                generator, appraiser.codec, fresh, config, seed * 1009 + attempt
            ):
                if isinstance(completion, Exception):
                    given_up.add(task.id)
                    problems.append(f"{generator.name}, task {task.id}: {completion}")
                else:
                    asked.append(
                        Asked(
                            _attempt(generator.name, task, attempt),
                            task,
                            completion,
                            generator.name,
                        )
                    )
            problems += _appraised(appraiser, asked, broken)
            if not open_:
                break
    appraiser.database.settle()
    return problems


def _appraised(appraiser: Appraiser, asked: Sequence[Asked], broken: set[str]) -> list[str]:
    """Measure; a task whose reference cannot be used is told, by name, and joins the broken ones.
    Other faults raise.
    """
    problems: list[str] = []
    while asked:
        try:
            appraiser.appraise(asked)
            break
        except TargetError as error:
            left = [one for one in asked if one.task.id != error.target]
            if len(left) == len(asked):
                raise
            broken.add(error.target)
            problems.append(f"task {error.target}: {error.problem}")
            asked = left
    return problems


def collected(database: Database) -> dict[str, Mapping[str, int]]:
    """For each generator: attempts, and how many ended in each outcome."""
    found: dict[str, dict[str, int]] = {}
    for sample in database.samples():
        if sample.name.startswith("collect/"):
            counts = found.setdefault(sample.origin, {"attempts": 0})
            counts["attempts"] += 1
            counts[sample.measured.outcome] = counts.get(sample.measured.outcome, 0) + 1
    return dict(found)


def rows(
    codec: TeachingCodec,
    tasks: Sequence[TrainingTask],
    database: Database,
    *,
    seed: int,
    how: RowConfig = RowConfig(),
) -> list[Row]:
    """What stage 1 learns from: each success plainly, and, where a task has three, with two others
    as exemplars.

    A model from scratch must see the format with exemplars; which of the three is the answer is
    drawn, so that improving is not taught, unless `how` asks for it.
    """
    found = []
    for task in tasks:
        dice = random.Random(f"{seed}/{task.id}")
        scores = _distinct(
            sample.measured
            for sample in database.samples(task.id)
            if sample.name.startswith("collect/")
        )
        for program in scores:
            found.append(Row(codec.prompt(task), codec.completion(task, program)))
            if len(scores) < 3:
                continue
            others = dice.sample([each for each in scores if each != program], 2)
            trio = sorted([program, *others], key=lambda each: (scores[each], each))
            answer = trio[-1] if how.improver else program
            shown = [Exemplar(each, scores[each]) for each in trio if each != answer]
            found.append(
                Row(
                    codec.prompt(task, shown),
                    codec.completion(task, answer, shown, analysis=how.analysis),
                )
            )
    return found


def selfsup(
    recorder: Recorder,
    codec: TeachingCodec,
    writer: Writer,
    config: SelfsupConfig,
    *,
    folder: Path,
    told: Told = lambda what, f: None,
) -> list[Mapping[str, float]]:
    """Train `writer` in place over all rounds, from the last finished one; the facts of each
    round's samples.
    """
    done = _rounds_done(writer, folder)
    facts = []
    for number in range(config.rounds):
        told(f"selfsup: round {number + 1} of {config.rounds}", number / config.rounds)
        drawn = [Shown(task) for task in recorder.tasks]
        if number < done:
            known = recorder.on_record(str(number), prompts=len(drawn), count=config.samples)
            facts.append(facts_of(known))
            continue
        found = recorder.sampled(
            writer, str(number), drawn, count=config.samples, temperature=config.temperature
        )
        facts.append(facts_of(found.measured))
        learned = [
            Row(codec.prompt(shown.task), codec.completion(shown.task, program))
            for i, shown in enumerate(found.shown)
            for program in _distinct(found.measured[i * config.samples : (i + 1) * config.samples])
        ]
        if learned:
            fit(writer, learned, config.fit, seed=recorder.seed * 101 + number)
        _save_round(writer, folder, number + 1)
    return facts


def _completions(
    generator: Policy, codec: Codec, tasks: Sequence[TrainingTask], config: CollectConfig, seed: int
) -> Iterator[tuple[TrainingTask, str | Exception]]:
    """One completion a task; all in one call, or one by one where the call fails, so that a task's
    failure is that task's.
    """
    prompts = [codec.prompt(task) for task in tasks]
    if not tasks:
        return
    try:
        answers = generator.sample(prompts, count=1, temperature=config.temperature, seed=seed)
        yield from ((task, answer[0]) for task, answer in zip(tasks, answers, strict=True))
        return
    except (Cudal1Error, OSError) as error:
        if len(tasks) == 1:
            yield tasks[0], error
            return
    for task in tasks:
        yield from _completions(generator, codec, [task], config, seed)


def _attempt(generator: str, task: TrainingTask, attempt: int) -> str:
    return f"collect/{generator}/{task.id}/{attempt}"


def _successes(database: Database, generator: str) -> dict[str, set[str]]:
    """By task, the different programs of this generator that succeeded."""
    found: dict[str, set[str]] = {}
    for sample in database.samples():
        if (
            sample.origin == generator
            and sample.measured.outcome == "ok"
            and sample.name.startswith("collect/")
        ):
            found.setdefault(sample.measured.task, set()).add(sample.measured.program)
    return found


def _distinct(measured: Sequence[Measured] | Iterator[Measured]) -> dict[str, float]:
    """Programs that succeeded, each once, with a score."""
    return {one.program: one.score for one in measured if one.score is not None}


def _rounds_done(writer: Writer, folder: Path) -> int:
    if not recovered(folder):
        return 0
    writer.model.load_state_dict(Writer.load(folder, device=str(writer.device)).model.state_dict())
    return int(json.loads((folder / "state.json").read_text(encoding="utf-8"))["rounds"])


def _save_round(writer: Writer, folder: Path, done: int) -> None:
    with replaced(folder) as fresh:
        writer.model.save_pretrained(fresh, safe_serialization=True)
        writer.tokenizer.save_pretrained(fresh)
        (fresh / "state.json").write_text(json.dumps({"rounds": done}), encoding="utf-8")
