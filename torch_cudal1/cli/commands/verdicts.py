"""The evaluation of a source as one JSON document, the same for two files and for a line of a release
file.

Every key is always there. `schema` is raised when a key changes its meaning or goes; new keys may
come without that.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from torch_cudal1.core.report import plain
from torch_cudal1.core.settings import Settings
from torch_cudal1.core.version import __version__
from torch_cudal1.device.target import contract_for, target_for
from torch_cudal1.ir.records import Accepted, Rejected, Timing
from torch_cudal1.judge.checks.registry import list_unasked
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluation, SourceEvaluationConfig
from torch_cudal1.judge.profiles import profile_for
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.sandbox.limits import Trust

__all__ = [
    "EXIT_CODES",
    "SCHEMA",
    "evaluation_document",
    "evaluation_job",
    "evaluation_outcome",
    "sha256",
    "unusable_document",
    "withdrawn_document",
]

# Scripts of users read these documents.
SCHEMA = 1
EXIT_CODES: Mapping[str, int] = MappingProxyType(
    # 0 only for a kernel that is right and faster: `cudal1 judge ... && deploy` must be safe. 4,
    # because 1 to 3 have the meaning that they have for other commands.
    {"accepted": 0, "not_faster": 4, "refused": 3, "reference_unusable": 2}
)


def evaluation_job(
    args: argparse.Namespace, settings: Settings, device: torch.device, *, trust: Trust
) -> SourceEvaluationConfig:
    """The evaluation that the command line asks for. `trust`: in the reference; a candidate is never
    trusted.
    """
    return SourceEvaluationConfig(
        settings, contract_for(settings), device, args.profile, not args.inference, trust
    )


def evaluation_document(
    evaluation: SourceEvaluation, job: SourceEvaluationConfig, *, reference: str
) -> dict[str, Any]:
    """Everything that is known about one candidate."""
    decision, baselines = evaluation.decision, evaluation.baselines
    rejected = decision if isinstance(decision, Rejected) else None
    return _make_head(job, reference, evaluation.candidate.text) | {
        "outcome": evaluation_outcome(evaluation),
        "reason": rejected.reason if rejected else "",
        "detector": rejected.detector if rejected else "",
        "numbers": plain(dict(rejected.numbers)) if rejected else {},
        "checks": [plain(check) for check in evaluation.verdict.checks],
        "error_ratio": plain(evaluation.verdict.worst_error_ratio),
        "timing": _encode_timing(evaluation.timing),
        "baselines": {
            "medians_us": dict(baselines.medians_us),
            "failures": dict(baselines.failures),
        }
        if baselines
        else None,
        # How far the candidate was confined is part of what the result is worth.
        "confinement": evaluation.confinement.to_json() if evaluation.confinement else None,
        "elapsed_s": {name: round(seconds, 3) for name, seconds in evaluation.elapsed_s.items()},
    }


def evaluation_outcome(evaluation: SourceEvaluation) -> str:
    """One of "accepted", "not_faster" (right), "refused", "reference_unusable" (it refused the
    inputs made for it).
    """
    decision = evaluation.decision
    if isinstance(decision, Accepted):
        return "accepted"
    # The detector "inputs" means that the reference refused the inputs made for it.
    if decision.detector == "inputs":
        return "reference_unusable"
    # A verdict passes before the timing, so a candidate may be right and have no time.
    return "not_faster" if evaluation.verdict.passed and decision.timing is not None else "refused"


def unusable_document(
    error: ReferenceFailure, job: SourceEvaluationConfig, *, reference: str, candidate: str
) -> dict[str, Any]:
    """The document of a pair whose reference could not be used."""
    return _make_empty_document(job, reference, candidate) | {
        "outcome": "reference_unusable",
        "reason": error.found,
        "detector": "inputs",
    }


def withdrawn_document(job: SourceEvaluationConfig, *, reference: str) -> dict[str, Any]:
    """The document of a line that holds no candidate."""
    return _make_empty_document(job, reference, "") | {
        "outcome": "withdrawn",
        "reason": "no code",
    }


def sha256(text: str) -> str:
    """Digest of a source."""
    # The JSON of a release file may hold lone surrogates, which `encode` refuses.
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _make_head(job: SourceEvaluationConfig, reference: str, candidate: str) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "package": __version__,
        "profile": job.profile,
        "contract": plain(job.contract),
        "gradients": job.gradients,
        "not_asked": list(list_unasked(profile_for(job.profile).name, gradients=job.gradients)),
        "device": str(job.device),
        "target": plain(target_for(job.device)),
        "sha256": {"reference": sha256(reference), "candidate": sha256(candidate)},
    }


def _make_empty_document(
    job: SourceEvaluationConfig, reference: str, candidate: str
) -> dict[str, Any]:
    # Every key is always there, so that a script needs no case for each outcome.
    absent: dict[str, Any] = {
        "numbers": {},
        "checks": [],
        "error_ratio": None,
        "timing": None,
        "baselines": None,
    }
    absent |= {"confinement": None, "elapsed_s": {}}
    return (
        _make_head(job, reference, candidate)
        | {"outcome": "", "reason": "", "detector": ""}
        | absent
    )


def _encode_timing(timing: Timing | None) -> dict[str, Any] | None:
    if timing is None:
        return None
    fields: dict[str, Any] = {
        name: value
        for name, value in plain(timing).items()
        # Both stand in the document already.
        if name not in ("verdict", "baselines_us")
    }
    return fields | {"saved_us": timing.saved_us}
