"""Kernels compiled before, found again by what they were compiled from: a compiler's work is kept
like a search's decisions.

The key is of the island's Program, the proposal and the architecture, in the folder of the versions
and sources of what compiles. Nothing in there was run: what is found is checked and timed like what
was compiled now. Only the user's own cache is asked, as whoever may write it is trusted. What
`purge` deletes meanwhile is compiled again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torch_cudal1 import judge
from torch_cudal1.core import telemetry
from torch_cudal1.core.version import __version__
from torch_cudal1.device.target import triton_version
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Candidate, Contract, Entry, Miss, Region, Rejected, Target
from torch_cudal1.kernels import Proposal
from torch_cudal1.store.cache.build_files import built_path
from torch_cudal1.store.cache.entry_file import decode_entry, digest_of, encode_entry
from torch_cudal1.store.cache.files import read_file, write_file
from torch_cudal1.store.context import Place

__all__ = ["build", "keep", "kept"]

_LIMIT_BYTES = 256 << 20


def build(
    region: Region, proposals: Sequence[Proposal], job: judge.Job, place: Place
) -> tuple[Candidate | Rejected, ...]:
    """One answer per proposal, in order: compiled before, or now in a process of the judge's and
    kept. Raises SandboxError.
    """
    root, sm = place.cache.root, int(place.target.arch.removeprefix("sm_"))
    known = {at: kept(root, region.program, proposal, sm) for at, proposal in enumerate(proposals)}
    left = [at for at, found in known.items() if isinstance(found, Miss)]
    answers = judge.build(region, [proposals[at] for at in left], job, place.target) if left else ()
    fresh = dict(zip(left, answers, strict=True))
    for at, answer in fresh.items():
        if isinstance(answer, Candidate):  # a refusal may be a lack of time or memory
            keep(root, region.program, proposals[at], sm, answer)
    telemetry.count("builds_found", len(proposals) - len(left))
    return tuple(
        found for at, one in known.items() if not isinstance(found := fresh.get(at, one), Miss)
    )


def kept(root: Path, program: Program, proposal: Proposal, sm: int) -> Candidate | Rejected | Miss:
    """What compiling `proposal` for an island's `program` yielded before, in the cache at `root`."""
    path = _path(root, program, proposal, sm)
    data = read_file(path, _LIMIT_BYTES)
    if not isinstance(data, Miss):
        entry = decode_entry(data)
        return entry if isinstance(entry, Miss) else entry.choice
    data = read_file(path.with_suffix(".json"), _LIMIT_BYTES)
    if isinstance(data, Miss):
        return data
    try:
        told = json.loads(data)
        return Rejected(str(told["reason"]), str(told["detector"]))
    except (ValueError, KeyError, TypeError) as error:
        return Miss(f"unreadable: {type(error).__name__}: {error}")


def keep(
    root: Path, program: Program, proposal: Proposal, sm: int, answer: Candidate | Rejected
) -> None:
    """Remember what compiling yielded, or that it never will. Where the disk refuses, the next one
    compiles again.
    """
    path = _path(root, program, proposal, sm)
    if isinstance(answer, Candidate):
        target = Target("cuda", f"sm_{sm}", "", "", torch.__version__, triton_version())
        evidence: dict[str, Any] = {"timing": None, "checks": [], "granularity": "island"}
        entry = Entry(path.stem, "", target, Contract(), answer, evidence, (), "", __version__)
        write_file(path, encode_entry(entry))
    else:
        write_file(
            path.with_suffix(".json"),
            json.dumps({"reason": answer.reason, "detector": answer.detector}).encode(),
        )


def _path(root: Path, program: Program, proposal: Proposal, sm: int) -> Path:
    return built_path(root, digest_of([program.digest, proposal.to_json(), sm]))
