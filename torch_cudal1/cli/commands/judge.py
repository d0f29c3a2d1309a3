"""`cudal1 judge REFERENCE CANDIDATE`: is a `ModelNew` right, and faster than the best way to run
its `Model`?

The files are read here and run elsewhere: neither is imported by this process.
`cli.commands.release` evaluates the lines of a release file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from torch_cudal1.cli.commands import device, release
from torch_cudal1.cli.commands.verdicts import (
    EXIT_CODES,
    evaluation_document,
    evaluation_job,
    unusable_document,
)
from torch_cudal1.cli.view.evaluation import show_evaluation
from torch_cudal1.cli.view.terminal import Screen
from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.machine_load import describe_other_load, sample_load
from torch_cudal1.core.report import plain
from torch_cudal1.core.settings import Settings
from torch_cudal1.judge.evaluate.source_evaluator import evaluate_source
from torch_cudal1.judge.reference.region_reference import ReferenceFailure

__all__ = ["run"]


def run(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Evaluate two files, or every line of a release file. Exit code 0 valid and faster, 4 not faster
    enough, 3 refused, 2 usage.
    """
    if args.release is not None:
        # A file beside --release would be ignored in silence.
        if args.reference is not None:
            raise SettingError(
                "REFERENCE",
                str(args.reference),
                "nothing beside --release, whose lines hold both sources",
            )
        return release.run(args, settings, screen)
    if args.reference is None or args.candidate is None:
        raise SettingError("REFERENCE CANDIDATE", None, "two Python files, or --release FILE.json")
    reference = _read(args.reference)
    candidate = _read(args.candidate)
    # "own": the user wrote or chose the reference on the command line. The candidate is never
    # trusted.
    job = evaluation_job(args, settings, torch.device(device.choose(args.device)), trust="own")
    load_before = sample_load()
    try:
        with screen.progress() as progress:
            content = evaluation_document(
                evaluate_source(reference, candidate, job, progress), job, reference=reference
            )
    # A reference that cannot run says nothing about the candidate, so this is an outcome of its
    # own.
    except ReferenceFailure as error:
        content = unusable_document(error, job, reference=reference, candidate=candidate)
    files = {"reference": str(args.reference), "candidate": str(args.candidate)}
    # The names of the files are not part of what was evaluated: the digests are.
    note = describe_other_load(load_before, sample_load())
    content = {**content, "files": files, "other_load": note}
    show_evaluation(screen, content)
    screen.json(content)
    if isinstance(args.json, Path):
        args.json.write_text(
            json.dumps(plain(content), indent=2, allow_nan=False) + "\n", encoding="utf-8"
        )
    return EXIT_CODES[content["outcome"]]


def _read(path: Path) -> str:
    """A text that is not UTF-8 still reaches the process that refuses it, with its bad bytes
    replaced.
    """
    return path.read_text(encoding="utf-8", errors="replace")
