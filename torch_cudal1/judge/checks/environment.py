"""Check `env_diff`: what a candidate leaves behind in its process, at import, construction, call
and deletion, and after all other checks.

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

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.source_reference import SourceReference
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child

__all__ = [
    "ENV_DIFF",
    "ENV_DIFF_CALLS",
    "ENV_DIFF_END",
    "check_environment_at_calls",
    "check_environment_at_end",
    "check_environment_at_load",
]

_GROUPS = ("flags", "process", "interpreter", "environment", "compilers", "operators")
_TABLES = ("identities", "modules")
_SECOND_SLOT = "env_diff"
_MAX_DELETED_BYTES = 1 << 30  # a second instance of a larger module is not made only to be deleted
_MAX_SHOWN = 4
# What torch itself sets while it compiles: variables that appear, and functions that Dynamo wraps
# once.
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
        ("torch.optim.lbfgs.LBFGS", "step"),
        ("torch.optim.sparse_adam.SparseAdam", "step"),
        ("torch", "manual_seed"),
    )
)


def check_environment_at_load(trial: Trial) -> list[CheckResult]:
    """Import and construction: nothing global is other than before the candidate came."""
    after = _read_state(trial.child, operators=_watches_operators(trial.child))
    return [_compare_states(trial.child, after, "import and construction")]


def check_environment_at_calls(trial: Trial) -> list[CheckResult]:
    """Calls on a living instance, random states included, then a second instance made, called and
    deleted.
    """
    sample, _ = trial.first_two
    # A first call may initialise what stays; only the next one is compared.
    trial.run(sample)
    # Generators get a secret state, so one that a call resets to a constant differs too.
    before = _read_state(trial.child, stir=secrets.randbits(32))
    trial.run(sample)
    after = _read_state(trial.child)
    checks = [
        _compare_states(
            trial.child, after, "calls", _list_moved_generators(trial, sample, before, after)
        )
    ]
    if (
        not checks[0].passed
        # There may be no memory for a second instance.
        or sum(spec.size_bytes for spec in trial.reference.specs) > _MAX_DELETED_BYTES
    ):
        return checks
    # A finalizer that restores or changes something runs at deletion only.
    trial.load(_SECOND_SLOT, trial.candidate)
    trial.call_slot(_SECOND_SLOT, sample.name)
    trial.child.call("forget", slot=_SECOND_SLOT)
    last = _read_state(trial.child, operators=_watches_operators(trial.child))
    return [*checks, _compare_states(trial.child, last, "deletion")]


def check_environment_at_end(trial: Trial) -> list[CheckResult]:
    """After all that was asked: training, other shapes, hundreds of calls."""
    after = _read_state(trial.child, operators=_watches_operators(trial.child))
    return [_compare_states(trial.child, after, "all that was asked")]


def _watches_operators(child: Child) -> bool:
    # Only of a stranger's process they are read, which takes 0.1 s each time.
    return bool(child.surroundings.get("operators"))


def _read_state(
    child: Child, *, stir: int | None = None, tables: bool = False, operators: bool = False
) -> Mapping[str, Any]:
    fields: dict[str, Any] = {"tables": tables, "operators": operators} | (
        {} if stir is None else {"stir": stir}
    )
    state = child.call("surroundings", **fields).get("surroundings")
    groups = (*_GROUPS, "random", "hints", "digests", *(_TABLES if tables else ()))
    # The answer comes from the process on trial: a missing group would be a group without changes.
    if not isinstance(state, dict) or any(
        not isinstance(state.get(group), dict) for group in groups
    ):
        raise CandidateFailure(
            "surroundings", "an answer without the groups of values that were asked for", "protocol"
        )
    return state


def _compare_states(
    child: Child, after: Mapping[str, Any], stage: str, more: tuple[str, ...] = ()
) -> CheckResult:
    before = child.surroundings
    changed = [*_list_changes(before, after), *more]
    # Digests first: whole tables have thousands of names, and mostly nothing changed.
    if after["digests"] != before["digests"]:
        changed += _list_replacements(before, _read_state(child, tables=True))
    compared = sum(len(before[group]) for group in (*_GROUPS, *_TABLES))
    if changed:
        shown = "; ".join(changed[:_MAX_SHOWN]) + (
            f"; and {len(changed) - _MAX_SHOWN} more" if len(changed) > _MAX_SHOWN else ""
        )
        return CheckResult("env_diff", False, float(len(changed)), 0.0, f"{stage} changed {shown}")
    # Honest code may move these values: they are recorded and refuse nothing.
    hints = [name for name, value in before["hints"].items() if after["hints"].get(name) != value]
    noted = f"; noted: {', '.join(hints)}" if hints else ""
    return CheckResult("env_diff", True, 0.0, 0.0, f"{stage}: {compared} values as before{noted}")


def _list_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for group in ("flags", "process", "interpreter", "compilers"):
        for name in sorted(before[group].keys() | after[group].keys()):
            old, new = before[group].get(name), after[group].get(name)
            # a flag that came with CUDA's start has no earlier value
            if old != new and not (old is None and group == "flags"):
                yield f"{name} from {str(old)[:60]} to {str(new)[:60]}"
    for name in before["operators"].keys() & after["operators"].keys():
        if before["operators"][name] != after["operators"][name]:
            yield f"the {name} of PyTorch's operators"
    yield from _list_variables(before["environment"], after["environment"])


def _list_replacements(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names that refer to another object than before, asked when a digest has changed. An object
    that was put back between digest and tables counts as replaced.
    """
    names = [
        f"sys.modules[{name!r}]"
        for name, identity in before["modules"].items()
        if after["modules"].get(name) != identity
    ]
    # A replaced module and a replaced function of a module are different tables.
    names += _list_replaced_members(before["identities"], after["identities"])
    # The digest had changed, and now it has not: code put the object back because it was asked.
    restored = after["digests"] == before["digests"]
    return names or (
        ["what stands behind a name, and put it back when it was asked for"] if restored else []
    )


def _list_variables(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        # Compilers add variables of their own; changing one that was there is a change.
        came = name not in before and name.startswith(_COMPILERS_VARIABLES)
        if before.get(name) != after.get(name) and not came:
            yield f"the variable {name}"


def _list_replaced_members(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for owner, members in before.items():
        now = after.get(owner, {})
        for name in members.keys() | now.keys():
            if members.get(name) != now.get(name) and not _is_wrapped_by_dynamo(owner, name):
                yield f"{owner}.{name.removeprefix('+')}"


def _is_wrapped_by_dynamo(owner: str, name: str) -> bool:
    in_optimizer = name.removeprefix("+") == "_init_group" or name.startswith("_fused_")
    return (owner, name) in _DYNAMO_WRAPS or (owner.startswith("torch.optim.") and in_optimizer)


def _list_moved_generators(
    trial: Trial, sample: InputSet, before: Mapping[str, Any], after: Mapping[str, Any]
) -> tuple[str, ...]:
    """Generators that a call moved and the reference's call does not."""
    moved = {
        name
        for name, state in after["random"].items()
        # A generator that is new, such as CUDA's, has no earlier state.
        if before["random"].get(name, state) != state
    }
    if moved and isinstance(trial.reference, SourceReference):
        # Dropout moves eager's generator as well: only what the reference does not move counts.
        oracle, seed = trial.reference.oracle, secrets.randbits(32)
        with trial.reference.open_used_instance(sample.inputs) as call:
            first = _read_state(oracle, stir=seed)["random"]
            call()
            moved -= {
                name
                for name, state in _read_state(oracle)["random"].items()
                if first.get(name) != state
            }
    return tuple(f"the random state of {name}" for name in sorted(moved))


ENV_DIFF = CheckSpec(
    name="env_diff",
    run=check_environment_at_load,
    failure="hack",
    is_concurrent=True,
    asks=(
        "what it leaves behind in its process at import and construction: flags, "
        "environment, patched functions"
    ),
)
ENV_DIFF_CALLS = CheckSpec(
    name="env_diff",
    run=check_environment_at_calls,
    step="env_diff_calls",
    failure="hack",
    is_concurrent=True,
    asks="then at calls, random state too, and at deletion",
)
# A change that waits for train mode, for gradients or for the hundredth call comes after the looks
# above.
ENV_DIFF_END = CheckSpec(
    name="env_diff",
    run=check_environment_at_end,
    step="env_diff_end",
    failure="hack",
    is_concurrent=True,
    asks="once more after all other checks, with training and many calls behind it",
)
