"""`cudal1 generate TARGET --llm URL|MODEL`: kernels from a language model, validated; the best go
into the cache.

The targets are read as text and never run here: the model is shown them, its programs run in the
judge's processes. A task's run is a folder below --out; given again it goes on, asking and
measuring nothing twice. Winners are treated like published kernels: validated again, lowered to
a Program, benchmarked against the best baseline, stored if they win.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torch_cudal1.api import targets
from torch_cudal1.cli.commands import device
from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.terminal import ProgressCallback, Screen
from torch_cudal1.core.errors import SandboxError, SettingError, TargetError
from torch_cudal1.core.kernelbench_format import NAMES
from torch_cudal1.core.report import plain
from torch_cudal1.core.settings import Settings
from torch_cudal1.ingest.formats.cuda_l1 import ReleaseLine, read_lines
from torch_cudal1.ingest.formats.task import PublishedTask
from torch_cudal1.ingest.llm.casebase import CaseBase
from torch_cudal1.ingest.llm.checker import CheckedEvaluator, ModelChecker, RuleChecker
from torch_cudal1.ingest.llm.endpoint import Completion, Endpoint, EndpointError, TokenPrices
from torch_cudal1.ingest.llm.evolve import (
    Budget,
    CompletionSource,
    Evolution,
    EvolutionPlan,
    Evolved,
    LocalWriter,
    Spent,
)
from torch_cudal1.ingest.llm.selectors import make_selector
from torch_cudal1.ingest.llm.text_codec import TextCodec
from torch_cudal1.ingest.published.adopt import Adoption, AdoptionOutcome
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluationConfig
from torch_cudal1.judge.pool.judge_evaluator import JudgeEvaluator
from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.judge.pool.measurement_settings import MeasurementSettings
from torch_cudal1.store.context import TuneContext, make_context

__all__ = ["run", "tasks_of"]

# 4 as for `judge`: right, and not faster enough.
_STORED, _FAILED, _NOT_FASTER = 0, 1, 4
# A speed-up is counted only above this (CUDA-L1, section 2.1).
_SUCCESS = 1.01


@dataclass(frozen=True)
class _EvolutionJob:
    """What all tasks share. `keep`: how many of the best are tried for the cache."""

    writer: CompletionSource
    evaluator: CheckedEvaluator
    plan: EvolutionPlan
    place: TuneContext
    keep: int
    out: Path


def run(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Evolve every task. Exit code 0 if a kernel was stored, 4 if none is faster, 1 if a task
    failed or the writer was silent.
    """
    tasks = [task for target in args.target for task in tasks_of(target)][: args.limit]
    # Without prices every call costs 0, and a limit on money would never be reached.
    if args.money is not None and not (args.price_prompt or args.price_completion):
        raise SettingError(
            "--money",
            args.money,
            "--price-prompt and --price-completion with it: a server tells tokens, not money",
        )
    place = make_context(torch.device(device.choose(args.device)), settings)
    # A wrong --llm or --selector is refused before the judge's processes start.
    writer, plan = _make_writer(args, settings, place), _plan(args)
    # Known ways of cheating: what was found in one task is looked for in the next ones.
    cases = CaseBase.shipped(args.out / "cheats.jsonl")
    measurement_settings = MeasurementSettings(
        settings, place.contract, place.device, settings.cache_dir / "locks"
    )
    rows: list[dict[str, Any]] = []
    with (
        screen.progress() as progress,
        # One pool for all tasks: its processes have imported what programs need.
        JudgeEvaluator(measurement_settings, slots=args.lanes or _count_slots(place)) as judge,
    ):
        for task in tasks:
            evaluator = CheckedEvaluator(judge, _make_checker(args, writer, cases), cases)
            rows.append(
                _evolve_task(
                    task,
                    _EvolutionJob(writer, evaluator, plan, place, args.keep, args.out),
                    progress,
                )
            )
            _show(screen, rows[-1])
    _show_table(screen, rows)
    screen.json(rows)
    # A writer that was silent is a failure of the run, even if earlier programs were stored.
    if any(row["problem"] or row["stopped"].startswith(writer.name) for row in rows):
        return _FAILED
    return _STORED if any(row["stored"] for row in rows) else _NOT_FASTER


def tasks_of(target: str) -> Iterator[TrainingTask]:
    """The references that a target names, as texts. Raises TargetError where there is none."""
    path = Path(target).expanduser()
    if path.is_file() and path.suffix in (".json", ".jsonl"):
        lines = [line for line in read_lines(path) if isinstance(line, ReleaseLine)]
        if not lines:
            raise TargetError(target, "no line of it is a task of a CUDA-L1 release")
        yield from (
            TrainingTask(f"level {line.level} task {line.task}", line.reference) for line in lines
        )
        return
    for single in targets.expand(target):
        file = Path(single).expanduser()
        if not file.is_file():
            raise TargetError(
                target, "a language model is shown a KernelBench-style file, and this is none"
            )
        # Text only: the target is never imported here, so it may be code of other people.
        content = file.read_text(encoding="utf-8", errors="replace")
        missing = [name for name in NAMES if f"{name}" not in content]
        if missing:
            raise TargetError(single, f"it defines no {', no '.join(missing)}")
        yield TrainingTask(str(file.with_suffix("")), content)


def _make_writer(
    args: argparse.Namespace, settings: Settings, place: TuneContext
) -> CompletionSource:
    if args.llm.startswith(("http://", "https://")):
        prices = TokenPrices(args.price_prompt, args.price_completion)
        return Endpoint.from_settings(
            args.llm, settings, model=args.llm_model, max_tokens=args.max_tokens, prices=prices
        )
    # A local model needs transformers, of the extra `train`. A server does not.
    from torch_cudal1.ingest.llm import policy as policy_module

    folder = Path(args.llm).expanduser()
    if not folder.is_dir():
        raise SettingError(
            "--llm", args.llm, "the URL of a server, or a folder that save_pretrained wrote"
        )
    dtype = "bfloat16" if place.device.type == "cuda" else "float32"
    policy = policy_module.LanguageModel.load(
        folder, max_new_tokens=args.max_tokens, device=str(place.device), dtype=dtype
    )
    tokenizer = policy.tokenizer

    def render_prompt(prompt: str) -> str:
        turns = [{"role": "user", "content": prompt}]
        # A base model has no chat template, and is given the plain prompt.
        return (
            str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
            if tokenizer.chat_template
            else prompt
        )

    return LocalWriter(
        policy, tokens=lambda content: len(tokenizer(content)["input_ids"]), rendered=render_prompt
    )


def _plan(args: argparse.Namespace) -> EvolutionPlan:
    budget = Budget(args.total_s, args.tokens, args.money)
    return EvolutionPlan(
        args.rounds, args.samples, args.temperature, args.seed, make_selector(args.selector), budget
    )


def _count_slots(place: TuneContext) -> int:
    # On a CPU, programs that run side by side would disturb each other's times.
    return min(8, max(1, (os.cpu_count() or 2) // 2)) if place.device.type == "cuda" else 1


def _make_checker(
    args: argparse.Namespace, writer: CompletionSource, cases: CaseBase
) -> RuleChecker | ModelChecker:
    def ask(prompt: str) -> str:
        # A low temperature: a checker should answer the same question alike.
        (answer,) = writer.ask_all([(prompt, 0)], temperature=0.2)
        return answer.text if isinstance(answer, Completion) else ""

    return RuleChecker(cases) if args.checker == "rules" else ModelChecker(ask, cases, writer.name)


def _evolve_task(
    task: TrainingTask, job: _EvolutionJob, progress: ProgressCallback
) -> dict[str, Any]:
    """One task's row. A problem is reported with the task's name, and the next task is done."""
    # A task's name may be a path. Cut from the left: the end of a path tells tasks apart.
    folder = job.out / "".join(c if c.isalnum() or c in "-_." else "_" for c in task.id)[-120:]
    name = (
        torch.cuda.get_device_name(job.place.device)
        if job.place.device.type == "cuda"
        else "the CPU it runs on"
    )
    try:
        with Evolution(task, job.writer, TextCodec(name), job.evaluator, folder) as evolution:
            # A run that goes on has samples of earlier ones: jumps of a score are seen against
            # those.
            job.evaluator.learn(list(evolution.database.samples()))
            evolved = evolution.run(job.plan, progress)
        adopted = _adopt_winners(task, evolved, job, progress)
    # A sandbox that cannot work ends the run; a target or an answer costs its own task only.
    except (TargetError, EndpointError) as error:
        return _make_row(Evolved(task.id, 0, None, (), {}, Spent()), [], str(error))
    return _make_row(evolved, adopted, "")


def _adopt_winners(
    task: TrainingTask, evolved: Evolved, job: _EvolutionJob, progress: ProgressCallback
) -> list[AdoptionOutcome]:
    """The best in turn, until one is stored. Raises SandboxError."""
    adopted: list[AdoptionOutcome] = []
    winners = [entry for entry in evolved.winners if entry.score > _SUCCESS][: job.keep]
    # No pool of processes is opened for nothing.
    if not winners:
        return adopted
    pair = SourceEvaluationConfig(
        # As for published kernels: "foreign", because a language model wrote the program; for
        # inference on inputs of the examples' form, as the stored Program will run.
        job.place.settings,
        job.place.contract,
        job.place.device,
        gradients=False,
        trust="foreign",
        drop_in=False,
    )
    with Adoption(job.place, pair, progress) as adoption:
        for entry in winners:
            claims = {"train_score": entry.score, "measured": entry.count}
            published = PublishedTask(
                f"generate:{task.id}",
                task.id,
                task.reference,
                entry.program,
                claims,
                {"writer": job.writer.name},
            )
            try:
                adopted.append(adoption.adopt(published))
            # This machine cannot evaluate anything, so the next program would fail too.
            except SandboxError:
                raise
            # A program that cannot be lowered in an unforeseen way costs its own attempt only.
            except (RuntimeError, ValueError, TypeError) as error:
                adopted.append(AdoptionOutcome("failed", f"{type(error).__name__}: {error}"))
            # The winners come best first, so the next one could only be slower.
            if adopted[-1].stored:
                break
    return adopted


def _make_row(evolved: Evolved, adopted: list[AdoptionOutcome], problem: str) -> dict[str, Any]:
    best = (
        {"score": evolved.winners[0].score, "program": evolved.winners[0].program}
        if evolved.winners
        else None
    )
    return {
        "task": evolved.task,
        "rounds": evolved.rounds,
        "best": best,
        "outcomes": evolved.outcomes,
        "spent": asdict(evolved.spent),
        "stopped": evolved.stopped,
        "adopted": [plain(attempt) for attempt in adopted],
        "stored": any(attempt.stored for attempt in adopted),
        "problem": problem,
    }


def _show(screen: Screen, row: dict[str, Any]) -> None:
    screen.line(f"{row['task']}: {_format_best(row)}")
    if problem := row["problem"] or row["stopped"]:
        screen.problem(f"{row['task']}: {problem}")


def _show_table(screen: Screen, table_rows: list[dict[str, Any]]) -> None:
    columns = (
        "task",
        "rounds",
        "programs",
        "with a score",
        "best in training",
        "in the cache",
        "tokens",
        "money",
    )
    rows = []
    for row in table_rows:
        spent, programs = row["spent"], sum(row["outcomes"].values())
        cached = (
            text.speedup(row["adopted"][-1]["low"]) if row["stored"] else _explain_adoption(row)
        )
        tokens = f"{'about ' * spent['estimated']}{spent['tokens']}"
        figures = [
            str(row["rounds"]),
            str(programs),
            str(row["outcomes"].get("ok", 0)),
            _format_best(row),
            cached,
            tokens,
        ]
        rows.append([text.brief(row["task"], 40), *figures, f"{spent['money']:.2f}"])
    screen.line("")
    screen.table(columns, rows)


def _format_best(row: dict[str, Any]) -> str:
    return text.speedup(row["best"]["score"]) if row["best"] else "nothing with a score"


def _explain_adoption(row: dict[str, Any]) -> str:
    if not row["adopted"]:
        return text.ABSENT
    # The first attempt was the best program, so its reason is the interesting one.
    last = row["adopted"][0]
    return text.brief(f"{last['outcome'].replace('_', ' ')}: {last['reason']}", 60)
