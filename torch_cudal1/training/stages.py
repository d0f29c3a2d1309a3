"""The stages before reinforcement learning: collect successes of several generators, fine-tune on
them, then on the model's own successes.

    collect   every (task, generator): up to 20 attempts, until 2 successes   (CUDA-L1, section 2.2)
    sft rows  the successes as prompts and answers, plain and with two exemplars
    selfsup   sample, measure, train on the successes, again: no baseline and no negative updates
              (section 2.3)

None of them looks at speed. A stage that was killed goes on from what is on record.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from torch_cudal1.core.errors import Cudal1Error, TargetError
from torch_cudal1.ingest.llm.appraise import Appraiser, NamedCompletion
from torch_cudal1.ingest.llm.database import Database
from torch_cudal1.ingest.llm.policy import LanguageModel, recover_folder, replace_folder
from torch_cudal1.ingest.llm.records import Codec, Exemplar, Policy
from torch_cudal1.judge.pool.measured import Measured, TrainingTask
from torch_cudal1.training.recorder import Recorder, TaskPrompt, summarize_outcomes
from torch_cudal1.training.supervised import FitConfig, SftRow, fine_tune

__all__ = [
    "CollectConfig",
    "ReportProgress",
    "RowConfig",
    "SelfsupConfig",
    "SupervisedCodec",
    "build_sft_rows",
    "collect",
    "count_outcomes",
    "ignore_progress",
    "self_supervise",
]

# An activity, and the fraction of it that is finished; None where that is not known.
ReportProgress: TypeAlias = Callable[[str, float | None], None]


def ignore_progress(activity: str, fraction: float | None) -> None:
    """A `ReportProgress` that shows nothing."""


class SupervisedCodec(Codec, Protocol):
    """A codec that can also write the answer that a model is to learn."""

    def completion(
        self,
        task: TrainingTask,
        program: str,
        exemplars: Sequence[Exemplar] = (),
        *,
        analysis: bool = True,
    ) -> str:
        """The completion that `decode` reads as this program; `analysis`: an analysis of the
        exemplars comes first.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """The paper's numbers. `attempts`: at most so many for a generator and task. `wanted`:
    successes after which a generator is not asked about a task again.
    """

    # Section 2.2 of the paper: at most 20 attempts, 2 successes. With six generators and 250 tasks
    # that is 3,000 at most; the paper collected 2,105.
    attempts: int = 20
    wanted: int = 2
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RowConfig:
    """`improver`: of three programs the best is the answer to the other two. `analysis`: an answer
    to exemplars begins with an analysis of them.
    """

    improver: bool = False
    analysis: bool = True


@dataclass(frozen=True, kw_only=True)
class SelfsupConfig:
    """The paper names no numbers. `samples`: completions of each task in a round."""

    rounds: int = 3
    samples: int = 4
    temperature: float = 1.0
    # A shorter and gentler fit than stage 1: the rows are the model's own samples.
    fit: FitConfig = field(default_factory=lambda: FitConfig(steps=100, learning_rate=3e-4))


def collect(
    appraiser: Appraiser,
    tasks: Sequence[TrainingTask],
    generators: Sequence[Policy],
    config: CollectConfig,
    *,
    seed: int,
    report: ReportProgress = ignore_progress,
) -> list[str]:
    """Ask every generator for every task. Returns a line for each problem other than a failing
    program, such as an endpoint that is down.

    A generator that raises for a task is not asked about that task again. No generator is asked
    about a task whose reference cannot be judged.
    """
    problems: list[str] = []
    unusable_tasks: set[str] = set()
    # Generators one after the other, and all tasks in each attempt: an attempt is one call of a
    # generator, which a model or a server answers as a batch.
    for place, generator in enumerate(generators):
        abandoned_tasks: set[str] = set()
        for attempt in range(config.attempts):
            report(
                f"collect: {generator.name}, attempt {attempt + 1}",
                (place + attempt / config.attempts) / len(generators),
            )
            # Read anew from the database in each attempt, not counted here: a resumed run counts
            # the successes of before.
            successes = _group_successes(appraiser.database, generator.name)
            open_tasks = [
                task
                for task in tasks
                # Different programs, not samples: a generator that repeats itself would fill its
                # quota with one program.
                if len(successes.get(task.id, ())) < config.wanted
                # An endpoint that refuses a prompt (too long, filtered) refuses it in all 20
                # attempts.
                and task.id not in abandoned_tasks | unusable_tasks
            ]
            requests, errors = _request_attempt(
                appraiser, generator, open_tasks, attempt, config, seed
            )
            abandoned_tasks |= errors.keys()
            problems += [
                f"{generator.name}, task {task}: {error}" for task, error in errors.items()
            ]
            problems += _appraise_usable(appraiser, requests, unusable_tasks)
            # After the attempt: one without open tasks makes no request.
            if not open_tasks:
                break
    # Successes are shown as exemplars from the next stage on; a view holds committed samples only.
    appraiser.database.settle()
    return problems


def count_outcomes(database: Database) -> dict[str, Mapping[str, int]]:
    """For each generator: attempts, and how many ended in each outcome."""
    counts_by_generator: dict[str, dict[str, int]] = {}
    for sample in database.samples():
        if sample.name.startswith("collect/"):
            counts = counts_by_generator.setdefault(sample.origin, {"attempts": 0})
            counts["attempts"] += 1
            counts[sample.measured.outcome] = counts.get(sample.measured.outcome, 0) + 1
    return dict(counts_by_generator)


def build_sft_rows(
    codec: SupervisedCodec,
    tasks: Sequence[TrainingTask],
    database: Database,
    *,
    seed: int,
    config: RowConfig = RowConfig(),
) -> list[SftRow]:
    """Build the rows of stage 1: each success without exemplars, and, where a task has three
    successes, with two others as exemplars.

    A model from scratch must see the format with exemplars. The answer is drawn among the three,
    unless `config` asks for the best.
    """
    rows = []
    for task in tasks:
        # A generator for each task: with other tasks in a run, the rows of this one stay as they
        # are.
        random_for_task = random.Random(f"{seed}/{task.id}")
        scores = _map_scores(
            sample.measured
            for sample in database.samples(task.id)
            # Later stages write into the same database; a stage 1 that is repeated after them must
            # not learn their programs.
            if sample.name.startswith("collect/")
        )
        for program in scores:
            rows.append(SftRow(codec.prompt(task), codec.completion(task, program)))
            # An answer and two exemplars (N = 2 in the paper), all different: an exemplar that is
            # the answer would teach copying.
            if len(scores) < 3:
                continue
            other_programs = [other for other in scores if other != program]
            trio = sorted(
                [program, *random_for_task.sample(other_programs, 2)],
                # Worst to best, as prompts show them later. The text breaks ties, so that the order
                # does not depend on that of a dictionary.
                key=lambda member: (scores[member], member),
            )
            # Improver rows are a switch: they teach improving in context already here, and would
            # change what the comparison of exemplars in stage 3 means.
            answer = trio[-1] if config.improver else program
            exemplars = [Exemplar(member, scores[member]) for member in trio if member != answer]
            rows.append(
                SftRow(
                    codec.prompt(task, exemplars),
                    codec.completion(task, answer, exemplars, analysis=config.analysis),
                )
            )
    return rows


def self_supervise(
    recorder: Recorder,
    codec: SupervisedCodec,
    writer: LanguageModel,
    config: SelfsupConfig,
    *,
    folder: Path,
    report: ReportProgress = ignore_progress,
) -> list[Mapping[str, float]]:
    """Train `writer` in place over all rounds, from the last finished one. Returns the metrics of
    each round's samples.
    """
    finished_rounds = _restore_rounds(writer, folder)
    metrics = []
    for number in range(config.rounds):
        report(f"selfsup: round {number + 1} of {config.rounds}", number / config.rounds)
        prompts = [TaskPrompt(task) for task in recorder.tasks]
        # Its weights are in the checkpoint. Sampling it again with later weights would be another
        # round.
        if number < finished_rounds:
            measurements = recorder.read_measurements(
                str(number), prompts=len(prompts), count=config.samples
            )
            metrics.append(summarize_outcomes(measurements))
            continue
        batch = recorder.sample(
            writer, str(number), prompts, count=config.samples, temperature=config.temperature
        )
        metrics.append(summarize_outcomes(batch.measurements))
        rows = [
            SftRow(codec.prompt(prompt.task), codec.completion(prompt.task, program))
            for i, prompt in enumerate(batch.prompts)
            # Each different success once: a program that the model writes in most samples would
            # otherwise fill the rows, and samples narrow from round to round.
            for program in _map_scores(
                batch.measurements[i * config.samples : (i + 1) * config.samples]
            )
        ]
        # A round without a success leaves the weights as they are; the next one draws other
        # samples.
        if rows:
            # From the seed and the round alone: the same rows in the same order after a kill.
            fine_tune(writer, rows, config.fit, seed=recorder.seed * 101 + number)
        # After the training: a kill before this repeats the round from the journal, without
        # measuring anything again.
        _save_round(writer, folder, number + 1)
    return metrics


def _request_attempt(
    appraiser: Appraiser,
    generator: Policy,
    tasks: Sequence[TrainingTask],
    attempt: int,
    config: CollectConfig,
    seed: int,
) -> tuple[list[NamedCompletion], dict[str, Exception]]:
    """Return a generator's completions of the tasks whose attempt is not on record, and the errors
    that it raised, by task.
    """
    new_tasks = [
        task
        for task in tasks
        # Failed attempts are on record too, so a second `collect` asks for no attempt twice.
        if not appraiser.database.has(_name_attempt(generator.name, task, attempt))
    ]
    requests: list[NamedCompletion] = []
    errors: dict[str, Exception] = {}
    for task, completion in _sample_completions(
        # Another seed for each attempt, or a deterministic sampler would answer all of them alike.
        generator,
        appraiser.codec,
        new_tasks,
        config,
        seed * 1009 + attempt,
    ):
        if isinstance(completion, Exception):
            errors[task.id] = completion
        else:
            name = _name_attempt(generator.name, task, attempt)
            requests.append(NamedCompletion(name, task, completion, generator.name))
    return requests, errors


def _appraise_usable(
    appraiser: Appraiser, requests: Sequence[NamedCompletion], unusable_tasks: set[str]
) -> list[str]:
    """Measure the completions. A task whose reference cannot be judged joins `unusable_tasks`, and
    a line that names it is returned; other faults raise.
    """
    problems: list[str] = []
    # The evaluator raises for the first task that it cannot judge; what was measured before is on
    # record and is not measured again.
    while requests:
        try:
            appraiser.appraise(requests)
            break
        except TargetError as error:
            usable = [request for request in requests if request.task.id != error.target]
            # The error names none of these tasks: repeating would never end.
            if len(usable) == len(requests):
                raise
            unusable_tasks.add(error.target)
            problems.append(f"task {error.target}: {error.problem}")
            requests = usable
    return problems


def _sample_completions(
    generator: Policy, codec: Codec, tasks: Sequence[TrainingTask], config: CollectConfig, seed: int
) -> Iterator[tuple[TrainingTask, str | Exception]]:
    """Yield one completion for each task. All tasks are asked for in one call; if it fails, each
    task in a call of its own, so that one failure does not cost the others.
    """
    prompts = [codec.prompt(task) for task in tasks]
    if not tasks:
        return
    try:
        completions = generator.sample(prompts, count=1, temperature=config.temperature, seed=seed)
        yield from ((task, group[0]) for task, group in zip(tasks, completions, strict=True))
        return
    # Errors of an endpoint, a model or the network. Anything else is a defect of this package, and
    # raises.
    except (Cudal1Error, OSError) as error:
        if len(tasks) == 1:
            yield tasks[0], error
            return
    for task in tasks:
        yield from _sample_completions(generator, codec, [task], config, seed)


def _name_attempt(generator: str, task: TrainingTask, attempt: int) -> str:
    return f"collect/{generator}/{task.id}/{attempt}"


def _group_successes(database: Database, generator: str) -> dict[str, set[str]]:
    """By task, the different programs of this generator that succeeded."""
    programs_by_task: dict[str, set[str]] = {}
    for sample in database.samples():
        if (
            sample.origin == generator
            and sample.measured.outcome == "ok"
            and sample.name.startswith("collect/")
        ):
            programs_by_task.setdefault(sample.measured.task, set()).add(sample.measured.program)
    return programs_by_task


def _map_scores(measurements: Iterable[Measured]) -> dict[str, float]:
    """Map each program that succeeded to its latest score."""
    return {
        measurement.program: measurement.score
        for measurement in measurements
        if measurement.score is not None
    }


def _restore_rounds(writer: LanguageModel, folder: Path) -> int:
    """Load the model of the last finished round. Returns how many rounds are finished."""
    # A kill in the middle of a replacement leaves the earlier round aside; it is put back first.
    if not recover_folder(folder):
        return 0
    # Into the caller's model: the caller goes on to use it after the last round.
    writer.model.load_state_dict(
        LanguageModel.load(folder, device=str(writer.device)).model.state_dict()
    )
    return int(json.loads((folder / "state.json").read_text(encoding="utf-8"))["rounds"])


def _save_round(writer: LanguageModel, folder: Path, rounds: int) -> None:
    # Weights and their count of rounds are replaced together: with one of them newer, a round would
    # be trained twice or left out.
    with replace_folder(folder) as new_folder:
        writer.model.save_pretrained(new_folder, safe_serialization=True)
        writer.tokenizer.save_pretrained(new_folder)
        (new_folder / "state.json").write_text(json.dumps({"rounds": rounds}), encoding="utf-8")
