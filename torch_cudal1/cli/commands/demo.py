"""`cudal1 demo`: accelerates a set of models on this machine and shows, with a table and a page,
what came of it.

Every number is measured here and now, with a cache that starts empty unless --cache-dir names one.
Models that gain nothing, and shortcuts that are refused, stay in the table.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import torch_cudal1 as cudal1
from torch_cudal1.api.targets import move_to_device
from torch_cudal1.cli.commands import device, doctor, end_to_end_measurement
from torch_cudal1.cli.commands.demo_modules import MODELS, Model
from torch_cudal1.cli.view import page, text
from torch_cudal1.cli.view.page import Story
from torch_cudal1.cli.view.terminal import ProgressCallback, Screen
from torch_cudal1.core.errors import Cudal1Error, SettingError
from torch_cudal1.core.machine_load import describe_other_load, sample_load
from torch_cudal1.core.report import Explanation
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.functional_module import copy_module
from torch_cudal1.judge import pool_scope

__all__ = ["run"]

_SEED = 0
# The least part of a model's planned time that it gets, however late it is: on a busy machine the
# demo overruns, up to twice its budget, rather than skipping models.
_LEAST_SHARE = 0.8
# The part of a model's progress bar that is its search.
_SEARCHED = 0.75
# Parts of a model's time. The rest is the end-to-end check, and compiling for the comparison.
_SEARCH_SHARE, _TIMING_SHARE = (
    0.65,
    0.1,
)


@dataclass(frozen=True)
class _DemoJob:
    """What every model of one demo shares."""

    settings: Settings
    device: str
    total_s: float
    # By the clock of `time.monotonic`.
    deadline: float
    progress: ProgressCallback


def run(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Run the demo and write the page. Exit code 1 if a model failed, or there was no time for any."""
    models = _select_models(args.only)
    where = device.choose(args.device)
    started, load_before = time.monotonic(), sample_load()
    stories = _make_stories(models, where, args, settings, screen)
    load_note = describe_other_load(load_before, sample_load())
    environment = doctor.as_environment(settings)
    intro = (
        f"{len(models)} models, accelerated on this machine and compared with eager PyTorch and torch.compile, on {where}. "
        "Every number was measured just now; nothing is stored with the program. Models that gained nothing are shown too: "
        "they run the fastest baseline, and where that is eager itself the speed-up is 1 by construction."
        + (f" {load_note}" if load_note else "")
    )
    content = page.render(
        "cudal1 demo: what it does on this machine", stories, environment, intro=intro
    )
    args.out.write_text(content, encoding="utf-8")
    _show_stories(stories, screen)
    if load_note:
        screen.line(f"\n{load_note}")
    screen.line(
        f"\n{_closing_line(stories)} Took {text.duration(time.monotonic() - started)}. Page: {args.out}"
    )
    screen.json(
        {
            "models": stories,
            "environment": environment,
            "other_load": load_note,
            "page": args.out,
            "seconds": time.monotonic() - started,
        }
    )
    # A model without gain is no failure; a demo without any measurement is.
    return 1 if any(s.problem for s in stories) or all(s.skipped for s in stories) else 0


def _make_stories(
    models: Sequence[Model],
    where: str,
    args: argparse.Namespace,
    settings: Settings,
    screen: Screen,
) -> list[Story]:
    """Accelerate and measure the models one after another, all within the demo's time."""
    deadline = time.monotonic() + args.total_s
    with ExitStack() as stack:
        # An empty cache: every number of the page is made now, on this machine.
        cache_dir = args.cache_dir or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="cudal1-demo-"))
        )
        progress = stack.enter_context(screen.progress())
        job = _DemoJob(
            settings.but(on_miss="tune", cache_dir=cache_dir),
            where,
            args.total_s,
            deadline,
            progress,
        )
        stack.enter_context(warnings.catch_warnings())
        # torch warns about its own code, which a user of the demo cannot change.
        warnings.simplefilter("ignore", FutureWarning)
        # Processes that have imported torch for one model serve the next one too.
        stack.enter_context(pool_scope())
        return [_make_story(models, i, job) for i in range(len(models))]


def _show_stories(stories: Sequence[Story], screen: Screen) -> None:
    screen.table(
        ("model", "regions", "what won", "vs eager", "vs Inductor", "worst error / eager's"),
        [_row(s) for s in stories],
    )
    # Also below the table, since stderr may be all that is kept.
    for story in stories:
        if story.problem or story.skipped:
            screen.problem(
                f"{story.explanation.target}: {story.problem or f'skipped: {story.skipped}'}"
            )


def _select_models(only: list[str]) -> tuple[Model, ...]:
    by_name = {model.name.lower(): model for model in MODELS}
    for name in only:
        if name.lower() not in by_name:
            raise SettingError(
                "--only", name, "one of " + ", ".join(model.name for model in MODELS)
            )
    return tuple(by_name[name.lower()] for name in only) or MODELS


def _make_story(models: Sequence[Model], index: int, job: _DemoJob) -> Story:
    model, left_s = models[index], job.deadline - time.monotonic()
    before, rest = (sum(m.weight for m in part) for part in (models[:index], models[index:]))
    empty = Explanation(target=model.name, device=job.device)
    # Twice the budget is used up.
    if left_s <= -job.total_s:
        return Story(
            explanation=empty,
            description=model.description,
            skipped="the time for the demo was used up (--budget-s)",
        )

    def progress(activity: str, fraction: float | None) -> None:
        job.progress(
            f"{model.name}: {activity}",
            (before + model.weight * (fraction or 0.0)) / (before + rest),
        )

    progress("building", 0.0)
    try:
        planned_s = job.total_s * model.weight / (before + rest)
        # Time that earlier models left over goes to the later ones, by their weights.
        share_s = max(_LEAST_SHARE * planned_s, left_s * model.weight / rest)
        return _measure_model(model, share_s, job, progress)
    # A model that fails stays on the page with its reason; the others still run.
    except (Cudal1Error, RuntimeError) as error:
        return Story(
            explanation=empty,
            description=model.description,
            problem=f"{type(error).__name__}: {error}",
        )


def _measure_model(
    model: Model, share_s: float, job: _DemoJob, progress: ProgressCallback
) -> Story:
    # One seed, so that weights and inputs are the same at every run.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        module, inputs = move_to_device(*model.build(), job.device)
    # Before `accelerate`, which works in place; and on a copy, because `double()` does too.
    reference = end_to_end_measurement.run_in_float64(module, inputs)
    # A binding holds for the grad mode in which it was prepared.
    with torch.no_grad():
        accelerated = cudal1.accelerate(
            # `accelerate` works in place, and the original is the eager side of the comparison.
            copy_module(module),
            inputs,
            settings=job.settings.but(
                budget_s=max(1.0, share_s * _SEARCH_SHARE),
                assume_finite=model.assume_finite or job.settings.assume_finite,
            ),
            progress=lambda activity, fraction: progress(
                activity, None if fraction is None else fraction * _SEARCHED
            ),
        )
        errors = [
            end_to_end_measurement.compute_scaled_error(run(*inputs), reference)
            for run in (accelerated, module)
        ]
    explanation = replace(cudal1.explain(accelerated), target=model.name)
    progress("timing it against eager and torch.compile", _SEARCHED)
    # Where eager itself runs there is nothing to measure: it is 1x by construction.
    served = None if explanation.untouched else accelerated
    timed = end_to_end_measurement.time_end_to_end(
        module, served, inputs, budget_s=share_s * _TIMING_SHARE
    )
    progress("done", 1.0)
    return Story(
        explanation=replace(explanation, end_to_end=timed),
        description=model.description,
        worst_error=errors[0],
        eager_error=errors[1],
    )


def _row(story: Story) -> list[str]:
    timed = story.explanation.end_to_end
    return [
        story.explanation.target,
        str(len(story.explanation.regions)),
        "failed"
        if story.problem
        else "skipped"
        if story.skipped
        else page.winners(story.explanation),
        text.speedup(timed.vs_eager if timed else None),
        text.speedup(timed.vs_inductor if timed else None),
        text.ABSENT
        if story.worst_error is None
        else f"{text.error(story.worst_error)} / {text.error(story.eager_error)}",
    ]


def _closing_line(stories: list[Story]) -> str:
    """The geometric mean, and how many got slower: the two numbers that a mean of ratios would
    hide.
    """
    speedups = [s.explanation.end_to_end.vs_eager for s in stories if s.explanation.end_to_end]
    if not speedups:
        return "Nothing was measured."
    # In float64 through logarithms: the geometric mean is the right one for ratios.
    mean = torch.tensor([i.value for i in speedups], dtype=torch.float64).log().mean().exp().item()
    slower = sum(i.high < 1 for i in speedups)
    return f"Geometric mean {text.speedup(mean)} vs eager over {len(speedups)} models; {slower} slower than eager."
