"""One cell of an experiment (an arm and a seed), and all cells of a plan side by side; both go on
after a kill.

A seed's cells share what chance decides: the starting model, collected samples, order of tasks, and
the programs that every arm finds on held-out tasks. Only what the arm is about differs. It runs on
a bench, which is the judge or a landscape of what the judge measured before; which of the two is in
every result. It compares nothing: `comparison` does.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch_cudal1.core.errors import SettingError
from torch_cudal1.ingest.llm.appraise import Appraiser, Asked
from torch_cudal1.ingest.llm.database import Database
from torch_cudal1.ingest.llm.journal import Journal
from torch_cudal1.ingest.llm.policy import Writer, create_tiny
from torch_cudal1.ingest.llm.records import Evaluator, Policy
from torch_cudal1.ingest.llm.selectors import selector
from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.training.contrastive import ContrastiveStep
from torch_cudal1.training.experiments.exam import Exam, examined, held_out_test, step_curve
from torch_cudal1.training.experiments.plan import Arm, Plan
from torch_cudal1.training.recorder import Chance, Recorder, Ruled
from torch_cudal1.training.rl_native import train
from torch_cudal1.training.stages import RowConfig, TeachingCodec, collect, collected, rows, selfsup
from torch_cudal1.training.supervised import fit

__all__ = ["Bench", "ClosedCodec", "base_of", "cell_of"]

Told = Callable[[str, float | None], None]


class ClosedCodec(TeachingCodec, Protocol):
    """A codec whose programs and words can be listed."""

    @property
    def vocabulary(self) -> Sequence[str]:
        """Every word of prompts and answers."""
        ...

    def programs(self, task: TrainingTask) -> Sequence[Any]:
        """Every program there is for a task; `.text` is its canonical form, `.hack` names its
        cheat.
        """
        ...


@dataclass(frozen=True)
class Bench:
    """What an experiment runs on. `label`: "replay" or "live", with where the numbers come from.
    `held_out`: tasks by kind.

    `device`: where the model is; measurements are made where the evaluator makes them. `problems`:
    tasks that were asked for and cannot be used, and why. `machine`: what live measurements are
    made with; nothing of a replay, whose landscape says it.
    """

    label: str
    codec: ClosedCodec
    evaluator: Evaluator
    generators: Sequence[Policy]
    train: tuple[TrainingTask, ...]
    held_out: Mapping[str, tuple[TrainingTask, ...]]
    device: str = "cpu"
    problems: tuple[str, ...] = ()
    machine: Mapping[str, str] = field(default_factory=dict)

    def limited(self, plan: Plan) -> Bench:
        """With as many tasks as the plan wants."""
        held_out = {
            kind: _spread(tasks, plan.held_out_tasks) for kind, tasks in self.held_out.items()
        }
        return replace(self, train=_spread(self.train, plan.train_tasks), held_out=held_out)

    @property
    def held_out_tasks(self) -> tuple[TrainingTask, ...]:
        """Of all kinds."""
        return tuple(task for tasks in self.held_out.values() for task in tasks)


def base_of(
    plan: Plan,
    bench: Bench,
    seed: int,
    folder: Path,
    *,
    analysis: bool = True,
    told: Told = lambda what, f: None,
) -> Path:
    """The seed's collected samples, its models after stages 1 and 2, and `facts.json`; made once,
    in `folder`/base.
    """
    base = folder / ("base" if analysis else "base-without-analysis")
    if (base / "facts.json").is_file():
        return base
    with _appraiser(bench, base / "samples.jsonl") as appraiser:
        problems = collect(
            appraiser, bench.train, bench.generators, plan.collect, seed=seed, told=told
        )
        if problems:
            raise OSError(f"collecting failed: {problems[0]} ({len(problems)} problems)")
        learned = rows(
            bench.codec,
            bench.train,
            appraiser.database,
            seed=seed,
            how=RowConfig(analysis=analysis),
        )
        if not learned:
            raise SettingError(
                "plan",
                plan.name,
                "tasks with a success: none of the collected samples is right and steady",
            )
        writer = _begun(plan, bench, base, seed)
        if not (base / "sft").is_dir():
            told("sft", None)
            fit(
                writer,
                learned,
                plan.sft,
                seed=seed,
                told=lambda step, loss: told("sft", step / plan.sft.steps),
            )
            writer.save(base / "sft")
        writer = _loaded(base / "sft", plan, bench)
        recorder = _recorder(appraiser, bench.train, base, "selfsup", seed)
        before = examined(replace(recorder, stage="exam-sft"), writer, Exam())
        rounds = selfsup(
            recorder, bench.codec, writer, plan.selfsup, folder=base / "selfsup", told=told
        )
        after = examined(replace(recorder, stage="exam-selfsup"), writer, Exam())
        facts = {
            "collected": collected(appraiser.database),
            "rows": len(learned),
            "rounds": rounds,
            "sft": before,
            "selfsup": after,
        }
    _found_programs(plan, bench, seed, base, told)
    _write(base / "facts.json", facts)
    return base


def cell_of(
    plan: Plan, bench: Bench, arm: Arm, seed: int, folder: Path, told: Told = lambda what, f: None
) -> dict[str, Any]:
    """Run one arm with one seed under `folder`, from wherever it was left. What came of it, as a
    JSON object.
    """
    base = base_of(plan, bench, seed, folder, analysis=not arm.without_analysis, told=told)
    cell = folder / arm.name
    _copied(base / "samples.jsonl", cell / "samples.jsonl")
    with _appraiser(bench, cell / "samples.jsonl") as appraiser:
        recorder = _recorder(appraiser, bench.train, cell, "rl", seed, _unlearned(arm, bench))
        writer = _loaded(base / ("sft" if arm.start == "sft" else "selfsup"), plan, bench)
        step = ContrastiveStep(
            recorder, arm.grpo(plan.rl), selector(arm.selector), arm.reward, budget=plan.budget
        )
        _third_stage(step, writer, arm, plan, seed, cell, told)
        exam = examined(
            replace(recorder, stage="exam"), writer, Exam(selector=selector(arm.selector))
        )
        curve = _with_log(
            step_curve(appraiser.database, "rl", [task.id for task in bench.train]), cell / "rl.log"
        )
    tests = {}
    for name in dict.fromkeys(
        (arm.selector, *(("none", "bucket") if arm.name in ("A4", "A6") else ()))
    ):
        told(f"held-out tasks with exemplars {name!r}", None)
        _copied(base / "held-out.jsonl", cell / f"held-out-{name}.jsonl")
        with _appraiser(bench, cell / f"held-out-{name}.jsonl") as appraiser:
            recorder = _recorder(
                appraiser,
                bench.held_out_tasks,
                cell,
                f"held-out-{name}",
                seed,
                _unlearned(arm, bench),
            )
            tests[name] = held_out_test(recorder, writer, selector(name), plan.held_out)
    kinds = {kind: [task.id for task in tasks] for kind, tasks in bench.held_out.items()}
    stages = json.loads((base / "facts.json").read_text(encoding="utf-8"))
    found = {
        "plan": plan.digest,
        "label": bench.label,
        "arm": arm.name,
        "seed": seed,
        "own": arm.selector,
        "kinds": kinds,
    }
    found |= {"machine": dict(bench.machine)} if bench.machine else {}
    return {
        **found,
        "stages": stages,
        "exam": exam,
        "curve": curve,
        "held_out": tests,
        "optimum": _optimum(bench),
    }


def _third_stage(
    step: ContrastiveStep, writer: Writer, arm: Arm, plan: Plan, seed: int, cell: Path, told: Told
) -> None:
    def gather(model: Writer, number: int) -> Any:
        told(f"{arm.name}, seed {seed}: step {number + 1}", min(1.0, step.spent / plan.budget))
        return step(model, number)

    def log(number: int, facts: Mapping[str, float]) -> None:
        with (cell / "rl.log").open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({"step": number, "loss": facts["loss"], "entropy": facts["entropy"]})
                + "\n"
            )

    if arm.learns:
        train(writer, gather, step.config, folder=cell / "rl", seed=seed, log=log)
        return
    number = 0
    while number < step.config.steps and gather(writer, number) is not None:
        number += 1


def _with_log(curve: list[dict[str, float]], path: Path) -> list[dict[str, float]]:
    """Entropy and loss beside what was measured, where a step was learned from; one that was done
    again says the same.
    """
    logged: dict[int, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            told = json.loads(line)
            logged[int(told["step"])] = {
                "entropy": float(told["entropy"]),
                "loss": float(told["loss"]),
            }
        except (ValueError, KeyError, TypeError):
            continue  # cut off by a kill
    return [{**point, **logged.get(int(point["step"]), {})} for point in curve]


def _optimum(bench: Bench) -> dict[str, float | None]:
    """The best there is for each task where every program was measured: the ceiling of any search;
    {} where that is not known.
    """
    best = getattr(bench.evaluator, "optimum", None)
    if best is None:
        return {}
    found = {task.id: best(task.id) for task in (*bench.train, *bench.held_out_tasks)}
    return {task: None if measured is None else measured.score for task, measured in found.items()}


def _found_programs(plan: Plan, bench: Bench, seed: int, base: Path, told: Told) -> None:
    """Successes on held-out tasks for every arm to find: the first that a draw over all programs
    meets, the same for a seed.
    """
    told("programs for held-out tasks", None)
    with _appraiser(bench, base / "held-out.jsonl") as appraiser:
        finder = Chance(
            appraiser, bench.held_out_tasks, Journal(base / "held-out.journal"), "found", seed
        )
        for task in bench.held_out_tasks:
            known: set[str] = set()
            for attempt in range(20 * plan.held_out.seeds):
                if len(known) >= plan.held_out.seeds:
                    break
                (found,) = appraiser.appraise(
                    [Asked(f"found/{task.id}/{attempt}", task, finder.one(task, attempt), "found")]
                )
                known |= {found.program} if found.outcome == "ok" else set()
        appraiser.database.settle()


def _begun(plan: Plan, bench: Bench, base: Path, seed: int) -> Writer:
    folder = base / "begin"
    if not folder.is_dir():
        create_tiny(
            folder, bench.codec.vocabulary, replace(plan.model, seed=plan.model.seed + seed)
        )
    return _loaded(folder, plan, bench)


def _loaded(folder: Path, plan: Plan, bench: Bench) -> Writer:
    return Writer.load(folder, max_new_tokens=plan.max_new_tokens, device=bench.device)


def _spread(tasks: tuple[TrainingTask, ...], count: int | None) -> tuple[TrainingTask, ...]:
    """`count` of the tasks, evenly apart: neighbours are shapes of one operation."""
    if count is None or count >= len(tasks):
        return tasks
    return tuple(tasks[i * len(tasks) // count] for i in range(count))


def _recorder(
    appraiser: Appraiser,
    tasks: Sequence[TrainingTask],
    folder: Path,
    stage: str,
    seed: int,
    kind: Callable[..., Recorder] = Recorder,
) -> Recorder:
    return kind(appraiser, tasks, Journal(folder / f"{stage}.journal"), stage, seed)


def _unlearned(arm: Arm, bench: Bench) -> Callable[..., Recorder]:
    """Who writes in an arm: its model, chance, or a rule that changes the best program shown."""
    if arm.start == "climb":
        return partial(Ruled, policy=next(one for one in bench.generators if one.name == "mutant"))
    return Chance if arm.start == "uniform" else Recorder


@contextmanager
def _appraiser(bench: Bench, path: Path) -> Iterator[Appraiser]:
    with Database(path) as database:
        yield Appraiser(bench.codec, bench.evaluator, database)


def _copied(source: Path, target: Path) -> None:
    """A copy, once: what was added to it afterwards stays."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target.with_suffix(".new"))
        os.replace(target.with_suffix(".new"), target)


def _write(path: Path, facts: Mapping[str, Any]) -> None:
    path.with_suffix(".new").write_text(json.dumps(facts, allow_nan=False), encoding="utf-8")
    os.replace(path.with_suffix(".new"), path)
