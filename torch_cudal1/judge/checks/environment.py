"""Detector `env_diff`: what a candidate leaves behind in its process, at import, construction, call
and deletion.

The child only reports values (`surroundings`); here they are compared with those it reported before
it had seen a byte of the candidate. Code that restores everything before each look, or lies for the
child, is not seen here: its results are still compared in this process, and its time is taken by
this process's clock.

What stands behind thousands of names comes as a digest, and whole when that is another than before.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from torch_cudal1.ir.records import Check
from torch_cudal1.judge.checks.numerics import first_two
from torch_cudal1.judge.reference.input_set import Sample
from torch_cudal1.judge.reference.source_reference import PairSubject
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child

__all__ = ["env_diff", "env_diff_calls"]

_GROUPS = ("flags", "process", "interpreter", "environment", "compilers")
_TABLES = ("identities", "modules")
_SLOT = "env_diff"
_DELETED_BYTES = 1 << 30  # a second instance of a larger module is not made only to be deleted
_SHOWN = 4
# What torch itself sets while it compiles: variables that appear, and Module's methods, which
# Dynamo wraps once.
_COMPILERS_VARIABLES = (
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "TRITON_",
    "CUDA_MODULE_LOADING",
    "KINETO_",
    "TORCH_",
)
_DYNAMO_WRAPS = frozenset(
    (
        ("torch.nn.modules.module.Module", "__init__"),
        ("torch.nn.modules.module.Module", "__setstate__"),
    )
)


def env_diff(trial: Trial) -> list[Check]:
    """Import and construction: nothing global is other than before the candidate came."""
    return [_check(trial.child, _look(trial.child), "import and construction")]


def env_diff_calls(trial: Trial) -> list[Check]:
    """Calls on a living instance, random states included, then a second instance made, called and
    deleted.
    """
    sample, _ = first_two(trial)
    trial.run(sample)
    before = _look(trial.child, stir=secrets.randbits(32))
    trial.run(sample)
    after = _look(trial.child)
    checks = [_check(trial.child, after, "calls", _random(trial, sample, before, after))]
    if (
        not checks[0].passed
        or sum(spec.size_bytes for spec in trial.subject.specs) > _DELETED_BYTES
    ):
        return checks
    trial.load(_SLOT, trial.candidate)
    trial.call_slot(_SLOT, sample.name)
    trial.child.call("forget", slot=_SLOT)
    return [*checks, _check(trial.child, _look(trial.child), "deletion")]


def _look(child: Child, *, stir: int | None = None, tables: bool = False) -> Mapping[str, Any]:
    asked: dict[str, Any] = {"tables": tables} | ({} if stir is None else {"stir": stir})
    found = child.call("surroundings", **asked).get("surroundings")
    groups = (*_GROUPS, "random", "hints", "digests", *(_TABLES if tables else ()))
    if not isinstance(found, dict) or any(
        not isinstance(found.get(group), dict) for group in groups
    ):
        raise CandidateFailure(
            "surroundings", "an answer without the groups of values that were asked for", "protocol"
        )
    return found


def _check(child: Child, after: Mapping[str, Any], stage: str, more: tuple[str, ...] = ()) -> Check:
    before = child.surroundings
    changed = [*_changes(before, after), *more]
    if after["digests"] != before["digests"]:
        changed += _replacements(before, _look(child, tables=True))
    compared = sum(len(before[group]) for group in (*_GROUPS, *_TABLES))
    if changed:
        shown = "; ".join(changed[:_SHOWN]) + (
            f"; and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        )
        return Check("env_diff", False, float(len(changed)), 0.0, f"{stage} changed {shown}")
    hints = [name for name, value in before["hints"].items() if after["hints"].get(name) != value]
    noted = f"; noted: {', '.join(hints)}" if hints else ""
    return Check("env_diff", True, 0.0, 0.0, f"{stage}: {compared} values as before{noted}")


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for group in ("flags", "process", "interpreter", "compilers"):
        for name in sorted(before[group].keys() | after[group].keys()):
            old, new = before[group].get(name), after[group].get(name)
            if old != new and not (
                old is None and group == "flags"
            ):  # a flag that came with CUDA's start has no earlier value
                yield f"{name} from {str(old)[:60]} to {str(new)[:60]}"
    yield from _environment(before["environment"], after["environment"])


def _replacements(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names behind which another object stands, when a digest has said that there are some; one
    whose owner put it back meanwhile is none of those that are allowed.
    """
    found = [
        f"sys.modules[{name!r}]"
        for name, identity in before["modules"].items()
        if after["modules"].get(name) != identity
    ]
    found += _replaced(before["identities"], after["identities"])
    restored = after["digests"] == before["digests"]
    return found or (
        ["what stands behind a name, and put it back when it was asked for"] if restored else []
    )


def _environment(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        came = name not in before and name.startswith(_COMPILERS_VARIABLES)
        if before.get(name) != after.get(name) and not came:
            yield f"the variable {name}"


def _replaced(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for owner, members in before.items():
        now = after.get(owner, {})
        for name in members.keys() | now.keys():
            if members.get(name) != now.get(name) and (owner, name) not in _DYNAMO_WRAPS:
                yield f"{owner}.{name.removeprefix('+')}"


def _random(
    trial: Trial, sample: Sample, before: Mapping[str, Any], after: Mapping[str, Any]
) -> tuple[str, ...]:
    """Generators that a call moved and the reference's call does not."""
    moved = {
        name
        for name, state in after["random"].items()
        if before["random"].get(name, state) != state
    }
    if moved and isinstance(trial.subject, PairSubject):
        oracle, seed = trial.subject.oracle, secrets.randbits(32)
        with trial.subject.living(sample.inputs) as call:
            first = _look(oracle, stir=seed)["random"]
            call()
            moved -= {
                name for name, state in _look(oracle)["random"].items() if first.get(name) != state
            }
    return tuple(f"the random state of {name}" for name in sorted(moved))
