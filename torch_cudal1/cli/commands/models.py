"""`cudal1 warmup`, `plan` and `explain`: one TARGET after another, a problem with one does not stop
the next.

Only the public functions of the package are used; what they answer is shown as text, JSON or an
HTML page.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import replace
from typing import Any

import torch

import torch_cudal1 as cudal1
from torch_cudal1.api import targets
from torch_cudal1.api.fleet.warmup_task import WarmupOrder
from torch_cudal1.cli.commands import compare_gpus, device, doctor, fleet, inductor_ahead
from torch_cudal1.cli.view import page, tables, text
from torch_cudal1.cli.view.terminal import ProgressCallback, Screen
from torch_cudal1.core.errors import SettingError, TargetError
from torch_cudal1.core.report import Explanation, Plan, plain
from torch_cudal1.core.settings import Settings

__all__ = ["explain", "plan", "warmup"]

_FOUND_WRONG, _USAGE = 1, 2


def warmup(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Fill the cache for every target. Exit code 1 if one failed, 2 if a TARGET cannot be loaded;
    the others are still done.
    """
    # A recorded call has other shapes than the target's own inputs, so other files.
    if args.with_inductor and args.recorded is not None:
        raise SettingError(
            "--with-inductor",
            "--recorded",
            "one of both: files are collected for a target's own inputs",
        )
    failed: list[TargetError | str] = []
    results: list[Any] = []
    resumed: tuple[str, ...] = ()
    lacking: list[str] = []
    # Folders become single targets, so that progress counts and a bad file costs its own row.
    names = [name for target in args.target for name in _expand_target(target, failed)]
    with screen.progress() as progress:
        # Workers are processes of their own. Without these options everything runs in this process.
        if fleet.wants_pool(args):
            outcome = fleet.warm_with_pool(args, names, settings, progress)
            results, resumed = list(outcome.results), outcome.resumed
            failed += outcome.unusable
            for problem in outcome.problems:
                screen.problem(problem)
        else:
            _warm_serially(args, names, settings, progress, results, failed)
        if args.with_inductor:
            lacking = _store_inductor_files(
                # Only targets whose decisions are stored: the collecting process starts with
                # on_miss="error".
                args,
                [r.target for r in results if not r.error],
                settings,
                progress,
            )
    # Before the problems of collecting: the decisions are stored whatever became of the files.
    _show_results(results, resumed, screen)
    for problem in lacking:
        screen.problem(problem)
    screen.json(
        {"results": results, "resumed": resumed, "failed": [str(error) for error in failed]}
    )
    chosen = device.choose(args.device)
    stories = [
        page.Story(
            explanation=replace(
                r.explanation or Explanation(target=r.target, device=chosen), target=r.target
            ),
            problem=r.error or "",
        )
        for r in results
    ]
    _write_page(
        args, screen, "cudal1 warmup", stories + _describe_failures(failed, chosen), settings
    )
    # Wrong usage (2) outranks a failure of the work (1).
    return _report_failures(screen, failed) or (
        _FOUND_WRONG if lacking or any(r.error for r in results) else 0
    )


def _store_inductor_files(
    args: argparse.Namespace, names: list[str], settings: Settings, progress: ProgressCallback
) -> list[str]:
    """Store what Inductor compiles for these targets; what could not be, by target."""
    order = WarmupOrder(
        # The process that collects may run in another folder.
        settings.but(cache_dir=settings.cache_dir.absolute()),
        args.training,
        device.choose(args.device),
    )
    problems: list[str] = []
    for name in names:
        progress(f"collecting what Inductor compiles for {name}", None)
        problems += [
            f"{name}: nothing compiled ahead: {reason}"
            for reason in inductor_ahead.collect([name], order).values()
        ]
    return problems


def _warm_serially(
    args: argparse.Namespace,
    names: list[str],
    settings: Settings,
    progress: ProgressCallback,
    results: list[Any],
    failed: list[TargetError | str],
) -> None:
    """All in this process."""
    chosen = device.choose(args.device)
    for i, name in enumerate(names):
        part = _scale_progress(progress, i, len(names), name if len(names) > 1 else "")
        try:
            options = {"training": args.training, "device": chosen, "recording": args.recorded}
            results += cudal1.warmup(name, settings=settings, progress=part, **options)
        except TargetError as error:
            failed.append(error)


def _show_results(results: list[Any], resumed: tuple[str, ...], screen: Screen) -> None:
    rows = [
        [
            r.target,
            "failed" if r.error else page.winners(r.explanation) if r.explanation else text.ABSENT,
            str(r.built),
            str(r.reused),
            text.duration(r.seconds),
        ]
        for r in results
    ]
    if rows:
        screen.table(("target", "what runs", "validated", "reused", "took"), rows)
    for r in results:
        if r.error:
            screen.problem(f"{r.target}: {r.error}")
    if resumed:
        screen.line(
            f"{text.count_text(len(resumed), 'target')} had been finished by a run that was interrupted"
        )


def plan(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Expected gain of every target, or what they cost on each GPU type. Exit code 2 if one cannot
    be loaded.
    """
    chosen = device.choose(args.device)
    plans: list[Plan] = []
    failed: list[TargetError] = []
    # Another question with an answer of its own; the estimate below would only repeat its targets.
    if args.compare:
        with screen.progress() as progress:
            comparison = compare_gpus.compare_targets(
                args, _load_each(args.target, chosen, progress, failed), settings, failed
            )
        compare_gpus.show_comparison(screen, comparison)
        screen.json({"comparison": comparison, "failed": [str(error) for error in failed]})
        return _report_failures(screen, failed)
    with screen.progress() as progress:
        for loaded in _load_each(args.target, chosen, progress, failed):
            # As the module is served: with gradients the capture would hold a backward graph.
            with torch.no_grad():
                plans.append(
                    replace(cudal1.plan(loaded.module, loaded.inputs, settings), target=loaded.name)
                )
    for row in plans:
        tables.show_plan(screen, row)
    screen.json({"plans": plans, "failed": [str(error) for error in failed]})
    return _report_failures(screen, failed)


def explain(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """What runs in every target and why. Exit code 1 under --fail-on-miss if a region had no stored
    decision.
    """
    chosen = device.choose(args.device)
    explanations: list[Explanation] = []
    failed: list[TargetError] = []
    # A counter of the process, which other targets may have raised before.
    missed_before = _count_misses()
    with screen.progress() as progress:
        for loaded in _load_each(args.target, chosen, progress, failed):
            try:
                explanations.append(_explain_target(loaded, settings, progress))
            except TargetError as error:
                # The inputs do not fit the module.
                failed.append(error)
    missed = _count_misses() - missed_before
    for explanation in explanations:
        tables.show_explanation(screen, explanation)
    screen.json(
        {"explanations": explanations, "misses": missed, "failed": [str(error) for error in failed]}
    )
    stories = [page.Story(explanation=explanation) for explanation in explanations]
    _write_page(
        args, screen, "cudal1 explain", stories + _describe_failures(failed, chosen), settings
    )
    # A target that cannot be loaded outranks a miss: its regions were never looked up.
    code = _report_failures(screen, failed)
    if not code and args.fail_on_miss and missed:
        screen.problem(
            f"{text.count_text(missed, 'region')} had no stored decision; run `cudal1 warmup TARGET` on this machine"
        )
        return _FOUND_WRONG
    return code


def _explain_target(
    loaded: targets.LoadedTarget, settings: Settings, progress: ProgressCallback
) -> Explanation:
    targets.try_call(loaded)
    # A binding holds for the grad mode in which it was prepared, and explanations are of inference.
    with torch.no_grad():
        module = cudal1.accelerate(
            loaded.module, loaded.inputs, settings=settings, progress=progress
        )
    explanation: Explanation = cudal1.explain(module)
    return replace(explanation, target=loaded.name)


def _load_each(
    names: list[str], chosen: str, progress: ProgressCallback, failed: list[TargetError]
) -> Iterator[targets.LoadedTarget]:
    """Load one target at a time, so that a folder of large models needs the memory of one."""
    for name in names:
        singles = _expand_target(name, failed)
        for i, single in enumerate(singles):
            progress(single, i / len(singles) if len(singles) > 1 else None)
            try:
                (loaded,) = targets.load(single, device=chosen)
            except TargetError as error:
                failed.append(error)
                continue
            try:
                yield loaded
            finally:
                # The generator's own reference would keep the module alive while the next one is
                # loaded.
                del loaded


def _expand_target(name: str, failed: MutableSequence[Any]) -> tuple[str, ...]:
    try:
        return targets.expand(name)
    except TargetError as error:
        failed.append(error)
        return ()


def _scale_progress(
    progress: ProgressCallback, index: int, count: int, name: str
) -> ProgressCallback:
    """Progress of one target as progress of all."""

    def report(activity: str, fraction: float | None) -> None:
        progress(
            f"{name}: {activity}" if name else activity,
            None if fraction is None else (index + fraction) / count,
        )

    return report


def _describe_failures(failed: Sequence[TargetError | str], chosen: str) -> list[page.Story]:
    """What a page says of targets that led to no module: a reader who has only the page must not
    miss them.
    """
    # Workers report such targets as text, which names no target for a heading.
    errors = [error for error in failed if isinstance(error, TargetError)]
    return [
        page.Story(
            explanation=Explanation(target=error.target, device=chosen), problem=error.problem
        )
        for error in errors
    ]


def _report_failures(screen: Screen, failed: Sequence[TargetError | str]) -> int:
    for error in failed:
        screen.problem(str(error))
    return _USAGE if failed else 0


def _count_misses() -> int:
    # The report of the process: `explain` itself has no counter of its own.
    return cudal1.report().counters.get("resolve.miss", 0)


def _write_page(
    args: argparse.Namespace,
    screen: Screen,
    title: str,
    stories: list[page.Story],
    settings: Settings,
) -> None:
    # Only a page needs the findings of `doctor`, which starts processes for them.
    if args.html is None:
        return
    content = page.render(
        title,
        stories,
        {name: str(plain(value)) for name, value in doctor.as_environment(settings).items()},
    )
    args.html.write_text(content, encoding="utf-8")
    screen.line(f"page: {args.html}")
