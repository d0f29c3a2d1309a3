"""Chooses the confinement of a child on this machine, from what each level was found to do here."""

from __future__ import annotations

from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.judge.sandbox import probe
from torch_cudal1.judge.sandbox.confinement_level import (
    MIN_LEVEL,
    REMEDIES,
    Confinement,
    choose_level,
)
from torch_cudal1.judge.sandbox.limits import Limits

__all__ = ["choose_confinement"]


def choose_confinement(limits: Limits) -> Confinement:
    """The confinement that a child gets on this machine.

    Raises SandboxError when its level is below the one that `limits.trust` needs.
    """
    probes = probe.find_levels(limits)
    choice = choose_level(limits.trust, probes, unsafe=limits.unsafe)
    reached = max(probed.level for probed in probes)
    if not choice.level:
        needed = MIN_LEVEL[limits.trust]
        reason = f"the sandbox must reach level {needed} for {limits.trust} code, here it reaches {reached}"
        hint = f"to get it: {REMEDIES[reached + 1]}; `cudal1 doctor` shows every control"
        extra = (
            "; or allow it all the same with the setting unsafe_sandbox"
            if limits.trust == "foreign" and reached
            else ""
        )
        raise SandboxError("starting", f"{reason} ({choice.missing}); {hint}{extra}")
    probe_result = next(probed for probed in probes if probed.level == choice.level)
    if choice.missing:
        telemetry.record(
            "judge", "sandbox", limits.trust, level=choice.level, missing=choice.missing
        )
    return Confinement(
        level=choice.level,
        trust=limits.trust,
        phase=limits.phase,
        uid=probe_result.uid,
        kernel=probe_result.kernel,
        landlock=probe_result.landlock if choice.level >= 2 else 0,
        filter_digest=probe.digest_filters(limits, choice.level),
        missing=choice.missing,
        unsafe=choice.level < 2 and limits.trust == "foreign",
    )
