"""The protocol: the checks that run in a candidate's process, in the order in which a candidate
meets them, one line a check. `contract`, `triage` and `cubin_scan` come before it, the checks of
timing after it.

`python -m torch_cudal1.judge.checks.registry` prints the table of docs/judge.md. A new check is one
`CheckSpec` in the file of its family, one line here, an attack in tests/adversarial and its test;
and a handler in `judge.worker` where the candidate's process must do something new.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch_cudal1.judge.checks import (
    concurrent,
    environment,
    history,
    int64_indexing,
    layouts,
    negative_controls,
    numerics,
    process,
    regimes,
    sanitizer,
    special_values,
    tf32,
)
from torch_cudal1.judge.checks.memory import (
    dead_launches,
    fresh_outputs,
    redzones,
    temporary_inputs,
    uninitialised_memory,
)
from torch_cudal1.judge.checks.module_semantics import (
    gradients,
    indices,
    loss_curve,
    masks,
    modes,
    parameters,
    scalars,
    updates,
)
from torch_cudal1.judge.checks.spec import PROFILE_ORDER, CheckName, CheckSpec
from torch_cudal1.judge.checks.static import contract, cubin_scan, triage
from torch_cudal1.judge.checks.unscheduled import FAILED_REQUESTS, TIMING_CHECKS
from torch_cudal1.judge.profiles import Profile, ProfileName

__all__ = ["CHECK_NAMES", "PROTOCOL", "format_table", "list_unasked", "select_checks"]

# Cheap and decisive first. Later ones read what earlier ones ran: `numerics` draws the input sets,
# `fresh_output` the repeated calls.
PROTOCOL: tuple[CheckSpec, ...] = (
    modes.STATE_DICT,
    environment.ENV_DIFF,
    numerics.NUMERICS,
    fresh_outputs.FRESH_OUTPUT,
    environment.ENV_DIFF_CALLS,
    uninitialised_memory.POISON,
    temporary_inputs.TEMPORARY_INPUTS,
    redzones.GUARD_BAND,
    redzones.GUARD_PAGE,
    tf32.RIGHTS,
    negative_controls.IMPOSTOR,
    regimes.REGIMES,
    parameters.PERTURB,
    scalars.SCALARS,
    masks.MASKS,
    indices.INDICES,
    indices.LEFT_OUT,
    indices.INDEX_TYPES,
    updates.UPDATE_PATH,
    layouts.SHAPES,
    int64_indexing.INT64_INDEXING,
    layouts.LAYOUTS,
    layouts.DTYPES,
    special_values.SPECIAL,
    history.CALL_HISTORY,
    concurrent.STREAM_ORDER,
    concurrent.CAPTURE,
    concurrent.REENTRANCY,
    history.REPEAT,
    gradients.GRAD,
    loss_curve.LOSS_CURVE,
    modes.TRAIN_MODE,
    modes.MODE,
    modes.TRANSFORMS,
    modes.GUARD_DOMAIN,
    dead_launches.GHOST,
    sanitizer.SANITIZER,
    process.RESOURCE,
    process.ISOLATION,
    environment.ENV_DIFF_END,
)

# every name that a result can have, in the order of the page
CHECK_NAMES: tuple[CheckName, ...] = (
    contract.CONTRACT,
    triage.TRIAGE,
    cubin_scan.CUBIN_SCAN,
    *PROTOCOL,
    *TIMING_CHECKS,
    *FAILED_REQUESTS,
)


def select_checks(profile: Profile, *, drop_in: bool = True) -> tuple[CheckSpec, ...]:
    """The checks of a profile, in order.

    `drop_in`: of a candidate that takes the reference's place; else of one that will only run for
    inference on inputs of the examples' form.
    """
    return tuple(
        check
        for check in PROTOCOL
        # A candidate under a guard never meets other shapes, modes or gradients than the examples'.
        if check.is_part_of(profile) and (drop_in or not check.replaces_only)
    )


def list_unasked(profile: ProfileName, *, gradients: bool = True) -> tuple[str, ...]:
    """What a profile asks nothing about, for a reader. `gradients`: whether they are asked for."""
    questions = [
        f"{check.name}: {check.asks}"
        for check in PROTOCOL
        if PROFILE_ORDER.index(check.since) > PROFILE_ORDER.index(profile)
    ]
    if not gradients:
        questions.append("grad, mode: gradients and train mode (--inference)")
    return tuple(questions)


def format_table() -> str:
    """The table of docs/judge.md: one row a name, from its steps."""
    return "\n".join(_iter_table_lines())


def _iter_table_lines() -> Iterator[str]:
    yield "| check | from | file | asks |"
    yield "| --- | --- | --- | --- |"
    # Steps of one name share a row, at the place of the first.
    for name in dict.fromkeys(each.name for each in CHECK_NAMES):
        steps = [each for each in CHECK_NAMES if each.name == name]
        first, *further = steps
        asks = "; ".join((first.asks, *(_describe_step(each, first) for each in further)))
        # Stored names are older than the files' names, so the table says which file a name means.
        files = ", ".join(dict.fromkeys(f"`{_find_file(each)}`" for each in steps))
        yield f"| `{name}` | `{first.since}` | {files} | {asks} |"


def _find_file(check: CheckName) -> str:
    """The file, below the package, that makes the results of a name."""
    module = check.run.__module__ if isinstance(check, CheckSpec) else check.module
    return module.removeprefix("torch_cudal1.").replace(".", "/") + ".py"


def _describe_step(step: CheckName, first: CheckName) -> str:
    return step.asks if step.since == first.since else f"from `{step.since}` on: {step.asks}"


if __name__ == "__main__":
    print(format_table())
