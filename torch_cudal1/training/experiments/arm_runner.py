"""Runs one arm of an experiment with one seed: stages 1 and 2, stage 3 or its frozen counterpart,
and the tests; it goes on after a kill.

The arms of a seed share what chance decides: the starting model, collected samples, order of tasks,
and the programs that every arm is shown on held-out tasks. Only what the arm is about differs. The
environment's evaluator is the judge or a landscape of what the judge measured before; each result
says which of the two. Results are compared by `comparison`.

    FOLDER/base/   samples.jsonl, begin, sft, selfsup (models), facts.json     shared by all arms
    FOLDER/A6/     samples.jsonl, rl (model), rl.log, held-out-*.jsonl         of one arm
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch_cudal1.core.errors import SettingError
from torch_cudal1.ingest.llm.appraise import Appraiser, NamedCompletion
from torch_cudal1.ingest.llm.database import Database
from torch_cudal1.ingest.llm.journal import SampleJournal
from torch_cudal1.ingest.llm.policy import LanguageModel, create_tiny
from torch_cudal1.ingest.llm.selectors import make_selector
from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.training.contrastive import ContrastiveStep
from torch_cudal1.training.environment import Environment
from torch_cudal1.training.experiments.plan import Arm, ExperimentPlan
from torch_cudal1.training.experiments.policy_eval import (
    PolicyEvalConfig,
    compute_step_curve,
    evaluate_held_out,
    evaluate_policy,
)
from torch_cudal1.training.grpo import train_policy
from torch_cudal1.training.recorder import Recorder, RuleRecorder, UniformRecorder
from torch_cudal1.training.stages import (
    ReportProgress,
    RowConfig,
    build_sft_rows,
    collect,
    count_outcomes,
    ignore_progress,
    self_supervise,
)
from torch_cudal1.training.supervised import SftRow, fine_tune

__all__ = ["run_arm", "train_base"]

# Uniform draws for each held-out program that every arm is to be shown.
_DRAWS_PER_HELD_OUT_SEED = 20


def train_base(
    plan: ExperimentPlan,
    environment: Environment,
    seed: int,
    folder: Path,
    *,
    analysis: bool = True,
    report: ReportProgress = ignore_progress,
) -> Path:
    """Make the base of a seed once, in `folder`/base: collected samples, the models after stages 1
    and 2, and `facts.json`. Returns its folder.
    """
    # Models of stage 1 with and without analysis differ, so arm A8 has a base of its own.
    base = folder / ("base" if analysis else "base-without-analysis")
    # Written last: its presence says that every part of the base is complete.
    if (base / "facts.json").is_file():
        return base
    with _open_appraiser(environment, base / "samples.jsonl") as appraiser:
        rows = _collect_rows(plan, environment, appraiser, seed, analysis, report)
        model = _train_sft(plan, environment, base, rows, seed, report)
        recorder = _make_recorder(appraiser, environment.train, base, "selfsup", seed)
        # Before self-supervision, which trains the same model in place.
        after_sft = evaluate_policy(replace(recorder, stage="exam-sft"), model, PolicyEvalConfig())
        rounds = self_supervise(
            recorder,
            environment.codec,
            model,
            plan.selfsup,
            folder=base / "selfsup",
            report=report,
        )
        after_selfsup = evaluate_policy(
            replace(recorder, stage="exam-selfsup"), model, PolicyEvalConfig()
        )
        facts = {
            "collected": count_outcomes(appraiser.database),
            "rows": len(rows),
            "rounds": rounds,
            "sft": after_sft,
            "selfsup": after_selfsup,
        }
    # After the database is closed: it opens another one, and held-out programs must never be in the
    # database from which prompts of training are drawn.
    _find_held_out_seeds(plan, environment, seed, base, report)
    _write_json(base / "facts.json", facts)
    return base


def run_arm(
    plan: ExperimentPlan,
    environment: Environment,
    arm: Arm,
    seed: int,
    folder: Path,
    report: ReportProgress = ignore_progress,
) -> dict[str, Any]:
    """Run one arm with one seed under `folder`, from the point where it was interrupted. Returns
    the result as a JSON object.
    """
    # Usually made by an earlier job; made here where an arm runs alone.
    base = train_base(
        plan, environment, seed, folder, analysis=not arm.without_analysis, report=report
    )
    arm_folder = folder / arm.name
    # A copy for each arm: arms of a seed begin with the same samples, and none sees what another
    # one finds. Journals have one writer, and arms run at the same time.
    _copy_once(base / "samples.jsonl", arm_folder / "samples.jsonl")
    with _open_appraiser(environment, arm_folder / "samples.jsonl") as appraiser:
        recorder = _make_recorder(
            appraiser, environment.train, arm_folder, "rl", seed, _choose_recorder(arm, environment)
        )
        # The same checkpoint for all arms of a seed: what chance decided in stages 1 and 2 cancels
        # in the paired differences.
        model = _load_model(base / ("sft" if arm.start == "sft" else "selfsup"), plan, environment)
        step = ContrastiveStep(
            # All arms have the same budget of different programs, frozen ones too: a table of arms
            # is read at equal cost of measuring.
            recorder,
            arm.grpo(plan.rl),
            make_selector(arm.selector),
            arm.reward,
            budget=plan.budget,
        )
        _run_third_stage(step, model, arm, plan, seed, arm_folder, report)
        exam = evaluate_policy(
            replace(recorder, stage="exam"),
            model,
            PolicyEvalConfig(selector=make_selector(arm.selector)),
        )
        step_curve = compute_step_curve(
            appraiser.database, "rl", [task.id for task in environment.train]
        )
    return {
        **_describe_arm(plan, environment, arm, seed),
        "stages": json.loads((base / "facts.json").read_text(encoding="utf-8")),
        "exam": exam,
        "curve": _add_log(step_curve, arm_folder / "rl.log"),
        "held_out": _test_held_out(plan, environment, arm, seed, base, arm_folder, model, report),
        "optimum": _find_optima(environment),
    }


def _describe_arm(
    plan: ExperimentPlan, environment: Environment, arm: Arm, seed: int
) -> dict[str, Any]:
    """What was run, and where."""
    facts: dict[str, Any] = {
        "plan": plan.digest,
        "label": environment.label,
        "arm": arm.name,
        "seed": seed,
        "own": arm.selector,
        "kinds": {
            kind: [task.id for task in tasks] for kind, tasks in environment.held_out.items()
        },
    }
    # Live seeds may come from different GPUs; each is compared with itself.
    if environment.machine:
        facts["machine"] = dict(environment.machine)
    return facts


def _collect_rows(
    plan: ExperimentPlan,
    environment: Environment,
    appraiser: Appraiser,
    seed: int,
    analysis: bool,
    report: ReportProgress,
) -> list[SftRow]:
    """Collect the generators' successes as rows. Raises OSError for any problem with a generator,
    since an experiment must be repeatable.
    """
    problems = collect(
        appraiser,
        environment.train,
        environment.generators,
        plan.collect,
        seed=seed,
        report=report,
    )
    # In a run a problem is reported and the run goes on; results of an experiment would depend on
    # which endpoint was down.
    if problems:
        raise OSError(f"collecting failed: {problems[0]} ({len(problems)} problems)")
    rows = build_sft_rows(
        environment.codec,
        environment.train,
        appraiser.database,
        seed=seed,
        config=RowConfig(analysis=analysis),
    )
    if not rows:
        raise SettingError(
            "plan",
            plan.name,
            "tasks with a success: none of the collected samples is right and steady",
        )
    return rows


def _train_sft(
    plan: ExperimentPlan,
    environment: Environment,
    base: Path,
    rows: Sequence[SftRow],
    seed: int,
    report: ReportProgress,
) -> LanguageModel:
    """Train the model of stage 1, or load it from its folder if it is there."""
    model = _create_model(plan, environment, base, seed)
    # `LanguageModel.save` replaces the folder as a whole, so a folder that is there is a finished
    # model.
    if not (base / "sft").is_dir():
        report("sft", None)
        fine_tune(
            model,
            rows,
            plan.sft,
            seed=seed,
            report=lambda step, loss: report("sft", step / plan.sft.steps),
        )
        model.save(base / "sft")
    # From the folder in both cases: a resumed run and one that was not interrupted go on from the
    # same bytes.
    return _load_model(base / "sft", plan, environment)


def _run_third_stage(
    step: ContrastiveStep,
    model: LanguageModel,
    arm: Arm,
    plan: ExperimentPlan,
    seed: int,
    arm_folder: Path,
    report: ReportProgress,
) -> None:
    """Run GRPO, or, for an arm that does not learn, the same steps without gradients."""

    def generate(policy: LanguageModel, number: int) -> Any:
        report(
            f"{arm.name}, seed {seed}: step {number + 1}",
            # Progress is of the budget, by which stage 3 ends; the last step may overshoot it.
            min(1.0, step.programs_spent / plan.budget),
        )
        return step(policy, number)

    def log(number: int, metrics: Mapping[str, float]) -> None:
        line = {"step": number, "loss": metrics["loss"], "entropy": metrics["entropy"]}
        # Appended and not rewritten: a resumed run keeps the lines of before. Entropy and loss are
        # in no database, since they are not measurements of programs.
        with (arm_folder / "rl.log").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    if arm.learns:
        train_policy(model, generate, step.config, folder=arm_folder / "rl", seed=seed, log=log)
        return
    number = 0
    # Numbers of steps are those of an arm that learns, so that tasks and exemplars are drawn alike.
    while number < step.config.steps and generate(model, number) is not None:
        number += 1


def _test_held_out(
    plan: ExperimentPlan,
    environment: Environment,
    arm: Arm,
    seed: int,
    base: Path,
    arm_folder: Path,
    model: LanguageModel,
    report: ReportProgress,
) -> dict[str, Any]:
    """Test the policy on held-out tasks; results by selector of exemplars. A4 and A6 are tested
    with bucket exemplars and without any, which separates the effect of training with exemplars
    from that of testing with them.
    """
    tests = {}
    # Without duplicates and in this order (`dict.fromkeys` below): each test costs measurements.
    selectors = [arm.selector, *(("none", "bucket") if arm.name in ("A4", "A6") else ())]
    for name in dict.fromkeys(selectors):
        report(f"held-out tasks with exemplars {name!r}", None)
        samples = arm_folder / f"held-out-{name}.jsonl"
        # Every test of every arm begins with the same programs on held-out tasks. In a rehearsal on
        # a synthetic landscape, where arms found their own, this inflated the variance.
        _copy_once(base / "held-out.jsonl", samples)
        with _open_appraiser(environment, samples) as appraiser:
            recorder = _make_recorder(
                appraiser,
                environment.held_out_tasks,
                arm_folder,
                f"held-out-{name}",
                seed,
                _choose_recorder(arm, environment),
            )
            tests[name] = evaluate_held_out(recorder, model, make_selector(name), plan.held_out)
    return tests


def _add_log(curve: list[dict[str, float]], path: Path) -> list[dict[str, float]]:
    """Add entropy and loss to the curve for each step that was trained on. A step that was repeated
    after a kill stands in the log twice, with the same numbers.
    """
    logged: dict[int, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
            # By step, the later line wins: a step that is repeated after a kill logs the same
            # numbers again.
            logged[int(entry["step"])] = {
                "entropy": float(entry["entropy"]),
                "loss": float(entry["loss"]),
            }
        except (ValueError, KeyError, TypeError):
            # A line that a kill cut off.
            continue
    return [{**point, **logged.get(int(point["step"]), {})} for point in curve]


def _find_optima(environment: Environment) -> dict[str, float | None]:
    """Return the best score of each task where every program was measured, which is the ceiling of
    any search; {} where it is not known.
    """
    # Only a landscape has measured every program. The judge knows no optimum.
    find_optimum = getattr(environment.evaluator, "optimum", None)
    if find_optimum is None:
        return {}
    optima = {
        task.id: find_optimum(task.id) for task in (*environment.train, *environment.held_out_tasks)
    }
    return {task: None if optimum is None else optimum.score for task, optimum in optima.items()}


def _find_held_out_seeds(
    plan: ExperimentPlan,
    environment: Environment,
    seed: int,
    base: Path,
    report: ReportProgress,
) -> None:
    """Find the programs on held-out tasks that every arm is shown: the first successes among
    uniform draws, the same for all arms of a seed.
    """
    report("programs for held-out tasks", None)
    with _open_appraiser(environment, base / "held-out.jsonl") as appraiser:
        recorder = UniformRecorder(
            appraiser,
            environment.held_out_tasks,
            SampleJournal(base / "held-out.journal"),
            "found",
            seed,
        )
        for task in environment.held_out_tasks:
            # Different programs: uniform draws may meet one twice.
            programs: set[str] = set()
            # A task may have hardly any right program (ragged shapes without masks); its search
            # must end.
            for attempt in range(_DRAWS_PER_HELD_OUT_SEED * plan.held_out.seeds):
                if len(programs) >= plan.held_out.seeds:
                    break
                request = NamedCompletion(
                    f"found/{task.id}/{attempt}",
                    task,
                    recorder.draw_program(task, attempt),
                    "found",
                )
                (measurement,) = appraiser.appraise([request])
                # `unstable` programs are no exemplars: they have no score to show.
                if measurement.outcome == "ok":
                    programs.add(measurement.program)
        appraiser.database.settle()


def _create_model(
    plan: ExperimentPlan, environment: Environment, base: Path, seed: int
) -> LanguageModel:
    folder = base / "begin"
    if not folder.is_dir():
        create_tiny(
            # Seeds of an experiment differ in their weights too; the plan's own offset lets two
            # plans differ.
            folder,
            environment.codec.vocabulary,
            replace(plan.model, seed=plan.model.seed + seed),
        )
    return _load_model(folder, plan, environment)


def _load_model(folder: Path, plan: ExperimentPlan, environment: Environment) -> LanguageModel:
    return LanguageModel.load(folder, max_new_tokens=plan.max_new_tokens, device=environment.device)


def _make_recorder(
    appraiser: Appraiser,
    tasks: Sequence[TrainingTask],
    folder: Path,
    stage: str,
    seed: int,
    recorder_type: Callable[..., Recorder] = Recorder,
) -> Recorder:
    return recorder_type(appraiser, tasks, SampleJournal(folder / f"{stage}.journal"), stage, seed)


def _choose_recorder(arm: Arm, environment: Environment) -> Callable[..., Recorder]:
    """Choose the author of an arm's programs: its model, chance, or a rule that changes the best
    program shown.
    """
    if arm.start == "climb":
        mutant = next(policy for policy in environment.generators if policy.name == "mutant")
        return partial(RuleRecorder, policy=mutant)
    return UniformRecorder if arm.start == "uniform" else Recorder


@contextmanager
def _open_appraiser(environment: Environment, path: Path) -> Iterator[Appraiser]:
    with Database(path) as database:
        yield Appraiser(environment.codec, environment.evaluator, database)


def _copy_once(source: Path, target: Path) -> None:
    """Copy a file unless `target` exists: samples that were added to it later must stay."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # Copied beside it and renamed: a kill in the middle must not leave half a journal that
        # counts as copied.
        shutil.copyfile(source, target.with_suffix(".new"))
        os.replace(target.with_suffix(".new"), target)


def _write_json(path: Path, facts: Mapping[str, Any]) -> None:
    # `allow_nan=False`: NaN is no JSON, and a table must not average one.
    path.with_suffix(".new").write_text(json.dumps(facts, allow_nan=False), encoding="utf-8")
    os.replace(path.with_suffix(".new"), path)
