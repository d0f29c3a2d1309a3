"""A cache of compiled kernels, keyed by the inputs of the compilation.

The key covers the fusion group's Program, the proposal and the architecture; the folder is named by
the compilers' versions and sources. A cached kernel was never run: it is checked and timed like a
new one. Only the user's own cache is read, whose writers are trusted. What `purge` deletes
meanwhile is compiled again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torch_cudal1 import judge
from torch_cudal1.core import telemetry
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.version import __version__
from torch_cudal1.device.target import triton_version
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Candidate, Contract, Entry, Region, Rejected, Target
from torch_cudal1.kernels import Proposal
from torch_cudal1.store.cache.build_files import build_path
from torch_cudal1.store.cache.entry_file import decode_entry, digest_of, encode_entry
from torch_cudal1.store.cache.files import read_file, write_file
from torch_cudal1.store.context import TuneContext

__all__ = ["build_proposals", "find_build", "store_build"]

# Larger files are refused unread, however they came into the folder.
_MAX_FILE_BYTES = 256 << 20


def build_proposals(
    region: Region, proposals: Sequence[Proposal], job: judge.EvaluationConfig, place: TuneContext
) -> tuple[Candidate | Rejected, ...]:
    """One answer per proposal, in order: from the cache, or compiled now in a process of the judge
    and stored. Raises SandboxError.
    """
    root, sm = place.cache.root, int(place.target.arch.removeprefix("sm_"))
    answers: dict[int, Candidate | Rejected] = {}
    for position, proposal in enumerate(proposals):
        # Before any process is started: a warm cache compiles nothing.
        stored = find_build(root, region.program, proposal, sm)
        if not isinstance(stored, Refusal):
            answers[position] = stored
    missing = [position for position in range(len(proposals)) if position not in answers]
    if missing:
        # All at once, since one process of the judge builds several.
        uncached = [proposals[position] for position in missing]
        built = judge.build_candidates(region, uncached, job, place.target)
        # `strict`: an answer at the wrong position would be stored under another kernel's key.
        for position, answer in zip(missing, built, strict=True):
            answers[position] = answer
            if isinstance(answer, Candidate):  # a rejection may be for lack of time or memory
                store_build(root, region.program, proposals[position], sm, answer)
    # Hits of this cache, for `report()`.
    telemetry.count("builds_found", len(proposals) - len(missing))
    return tuple(answers[position] for position in range(len(proposals)))


def find_build(
    root: Path, program: Program, proposal: Proposal, sm: int
) -> Candidate | Rejected | Refusal:
    """What compiling `proposal` for a fusion group's `program` yielded, in the cache at `root`."""
    path = _build_path(root, program, proposal, sm)
    data = read_file(path, _MAX_FILE_BYTES)
    if not isinstance(data, Refusal):
        entry = decode_entry(data)
        return entry if isinstance(entry, Refusal) else entry.choice
    # A rejection that is sure to come again is kept beside the builds.
    data = read_file(path.with_suffix(".json"), _MAX_FILE_BYTES)
    if isinstance(data, Refusal):
        return data
    try:
        fields = json.loads(data)
        return Rejected(str(fields["reason"]), str(fields["detector"]))
    # Only the user's own cache is read, but a write may have been cut off.
    except (ValueError, KeyError, TypeError) as error:
        return Refusal(f"unreadable: {type(error).__name__}: {error}")


def store_build(
    root: Path, program: Program, proposal: Proposal, sm: int, answer: Candidate | Rejected
) -> None:
    """Remember what compiling yielded, or that it never will. Where the disk refuses, the next one
    compiles again.
    """
    path = _build_path(root, program, proposal, sm)
    if isinstance(answer, Candidate):
        # No driver and no GPU model: compiling depends on neither.
        target = Target("cuda", f"sm_{sm}", "", "", torch.__version__, triton_version())
        # Nothing was run, so the entry claims nothing.
        evidence: dict[str, Any] = {"timing": None, "checks": [], "granularity": "island"}
        entry = Entry(path.stem, "", target, Contract(), answer, evidence, (), "", __version__)
        write_file(path, encode_entry(entry))
    else:
        write_file(
            path.with_suffix(".json"),
            json.dumps({"reason": answer.reason, "detector": answer.detector}).encode(),
        )


def _build_path(root: Path, program: Program, proposal: Proposal, sm: int) -> Path:
    # The folder above it is named by the compilers' versions and sources, so an update finds
    # nothing old.
    return build_path(root, digest_of([program.digest, proposal.to_json(), sm]))
