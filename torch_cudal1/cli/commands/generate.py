"""`cudal1 generate TARGET --llm URL|MODEL`: kernels from a language model, judged; the best go into
the cache.

The targets are read as text and never run here: the model is shown them, its programs run in the
judge's processes. A task's run is a folder below --out; given again it goes on, asking and
measuring nothing twice. Winners take the way of published kernels: judged anew, lowered to a
Program, raced against the best baseline, stored if they win.
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
from torch_cudal1.ingest.formats.cuda_l1 import Line, read_lines
from torch_cudal1.ingest.formats.published_task import Task
from torch_cudal1.ingest.llm.casebase import CaseBase
from torch_cudal1.ingest.llm.checker import Checked, ModelChecker, RuleChecker
from torch_cudal1.ingest.llm.endpoint import Answer, Endpoint, EndpointError, Prices
from torch_cudal1.ingest.llm.evolve import (
    Budget,
    Evolution,
    Evolved,
    LocalWriter,
    Plan,
    Spent,
    Writer,
)
from torch_cudal1.ingest.llm.selectors import selector
from torch_cudal1.ingest.llm.text_codec import TextCodec
from torch_cudal1.ingest.published.adopt import Adopted, Adoption
from torch_cudal1.judge.evaluate.source_evaluator import PairJob
from torch_cudal1.judge.pool.evaluator import JudgeEvaluator
from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.judge.pool.terms import Terms
from torch_cudal1.store.context import Place, place_for

__all__ = ["run", "tasks_of"]

_STORED, _FAILED, _NOT_FASTER = 0, 1, 4
_SUCCESS = 1.01


@dataclass(frozen=True)
class _Job:
    """What all tasks share. `keep`: how many of the best are tried for the cache."""

    writer: Writer
    evaluator: Checked
    plan: Plan
    place: Place
    keep: int
    out: Path


def run(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Evolve every task. Exit code 0 if a kernel was stored, 4 if none is faster, 1 if a task
    failed or the writer was silent.
    """
    tasks = [task for target in args.target for task in tasks_of(target)][: args.limit]
    if args.money is not None and not (args.price_prompt or args.price_completion):
        raise SettingError(
            "--money",
            args.money,
            "--price-prompt and --price-completion with it: a server tells tokens, not money",
        )
    place = place_for(torch.device(device.choose(args.device)), settings)
    writer, plan = _writer(args, settings, place), _plan(args)
    cases = CaseBase.shipped(args.out / "cheats.jsonl")
    terms = Terms(settings, place.contract, place.device, settings.cache_dir / "locks")
    made: list[dict[str, Any]] = []
    with (
        screen.progress() as progress,
        JudgeEvaluator(terms, lanes=args.lanes or _lanes(place)) as judge,
    ):
        for task in tasks:
            evaluator = Checked(judge, _checker(args, writer, cases), cases)
            made.append(
                _evolved(task, _Job(writer, evaluator, plan, place, args.keep, args.out), progress)
            )
            _show(screen, made[-1])
    _table(screen, made)
    screen.json(made)
    if any(one["problem"] or one["stopped"].startswith(writer.name) for one in made):
        return _FAILED
    return _STORED if any(one["stored"] for one in made) else _NOT_FASTER


def tasks_of(target: str) -> Iterator[TrainingTask]:
    """The references that a target names, as texts. Raises TargetError where there is none."""
    path = Path(target).expanduser()
    if path.is_file() and path.suffix in (".json", ".jsonl"):
        found = [one for one in read_lines(path) if isinstance(one, Line)]
        if not found:
            raise TargetError(target, "no line of it is a task of a CUDA-L1 release")
        yield from (
            TrainingTask(f"level {one.level} task {one.task}", one.reference) for one in found
        )
        return
    for single in targets.expand(target):
        file = Path(single).expanduser()
        if not file.is_file():
            raise TargetError(
                target, "a language model is shown a KernelBench-style file, and this is none"
            )
        content = file.read_text(encoding="utf-8", errors="replace")
        missing = [name for name in NAMES if f"{name}" not in content]
        if missing:
            raise TargetError(single, f"it defines no {', no '.join(missing)}")
        yield TrainingTask(str(file.with_suffix("")), content)


def _writer(args: argparse.Namespace, settings: Settings, place: Place) -> Writer:
    if args.llm.startswith(("http://", "https://")):
        prices = Prices(args.price_prompt, args.price_completion)
        return Endpoint.from_settings(
            args.llm, settings, model=args.llm_model, max_tokens=args.max_tokens, prices=prices
        )
    from torch_cudal1.ingest.llm import (
        policy as policy_module,
    )  # needs the extra `train`; a server does not

    folder = Path(args.llm).expanduser()
    if not folder.is_dir():
        raise SettingError(
            "--llm", args.llm, "the URL of a server, or a folder that save_pretrained wrote"
        )
    dtype = "bfloat16" if place.device.type == "cuda" else "float32"
    policy = policy_module.Writer.load(
        folder, max_new_tokens=args.max_tokens, device=str(place.device), dtype=dtype
    )
    read = policy.tokenizer

    def rendered(prompt: str) -> str:
        turns = [{"role": "user", "content": prompt}]
        return (
            str(read.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
            if read.chat_template
            else prompt
        )

    return LocalWriter(
        policy, tokens=lambda content: len(read(content)["input_ids"]), rendered=rendered
    )


def _plan(args: argparse.Namespace) -> Plan:
    budget = Budget(args.total_s, args.tokens, args.money)
    return Plan(
        args.rounds, args.samples, args.temperature, args.seed, selector(args.selector), budget
    )


def _lanes(place: Place) -> int:
    return min(8, max(1, (os.cpu_count() or 2) // 2)) if place.device.type == "cuda" else 1


def _checker(
    args: argparse.Namespace, writer: Writer, cases: CaseBase
) -> RuleChecker | ModelChecker:
    def ask(prompt: str) -> str:
        (answer,) = writer.ask_all([(prompt, 0)], temperature=0.2)
        return answer.text if isinstance(answer, Answer) else ""

    return RuleChecker(cases) if args.checker == "rules" else ModelChecker(ask, cases, writer.name)


def _evolved(task: TrainingTask, job: _Job, progress: ProgressCallback) -> dict[str, Any]:
    """One task's row. What is wrong with a task is told with its name, and the next one is done."""
    folder = job.out / "".join(c if c.isalnum() or c in "-_." else "_" for c in task.id)[-120:]
    name = (
        torch.cuda.get_device_name(job.place.device)
        if job.place.device.type == "cuda"
        else "the CPU it runs on"
    )
    try:
        with Evolution(task, job.writer, TextCodec(name), job.evaluator, folder) as evolution:
            job.evaluator.learn(list(evolution.database.samples()))
            found = evolution.run(job.plan, progress)
        adopted = _adopted(task, found, job, progress)
    except (TargetError, EndpointError) as error:
        return _row(Evolved(task.id, 0, None, (), {}, Spent()), [], str(error))
    return _row(found, adopted, "")


def _adopted(
    task: TrainingTask, found: Evolved, job: _Job, progress: ProgressCallback
) -> list[Adopted]:
    """The best in turn, until one is stored. Raises SandboxError."""
    tried: list[Adopted] = []
    winners = [entry for entry in found.winners if entry.score > _SUCCESS][: job.keep]
    if not winners:
        return tried
    pair = PairJob(
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
            one = Task(
                f"generate:{task.id}",
                task.id,
                task.reference,
                entry.program,
                claims,
                {"writer": job.writer.name},
            )
            try:
                tried.append(adoption.adopt(one))
            except SandboxError:
                raise
            except (RuntimeError, ValueError, TypeError) as error:
                tried.append(Adopted("failed", f"{type(error).__name__}: {error}"))
            if tried[-1].stored:
                break
    return tried


def _row(found: Evolved, adopted: list[Adopted], problem: str) -> dict[str, Any]:
    best = (
        {"score": found.winners[0].score, "program": found.winners[0].program}
        if found.winners
        else None
    )
    return {
        "task": found.task,
        "rounds": found.rounds,
        "best": best,
        "outcomes": found.outcomes,
        "spent": asdict(found.spent),
        "stopped": found.stopped,
        "adopted": [plain(one) for one in adopted],
        "stored": any(one.stored for one in adopted),
        "problem": problem,
    }


def _show(screen: Screen, row: dict[str, Any]) -> None:
    screen.line(f"{row['task']}: {_best(row)}")
    if told := row["problem"] or row["stopped"]:
        screen.problem(f"{row['task']}: {told}")


def _table(screen: Screen, made: list[dict[str, Any]]) -> None:
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
    for one in made:
        spent, asked = one["spent"], sum(one["outcomes"].values())
        kept = text.speedup(one["adopted"][-1]["low"]) if one["stored"] else _why(one)
        tokens = f"{'about ' * spent['estimated']}{spent['tokens']}"
        figures = [
            str(one["rounds"]),
            str(asked),
            str(one["outcomes"].get("ok", 0)),
            _best(one),
            kept,
            tokens,
        ]
        rows.append([text.brief(one["task"], 40), *figures, f"{spent['money']:.2f}"])
    screen.line("")
    screen.table(columns, rows)


def _best(row: dict[str, Any]) -> str:
    return text.speedup(row["best"]["score"]) if row["best"] else "nothing with a score"


def _why(row: dict[str, Any]) -> str:
    if not row["adopted"]:
        return text.ABSENT
    last = row["adopted"][0]
    return text.brief(f"{last['outcome'].replace('_', ' ')}: {last['reason']}", 60)
