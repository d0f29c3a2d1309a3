"""The level of a sandbox is what its probe saw: each control stops an act that happens without it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest
import torch

from torch_cudal1.judge.sandbox import probe
from torch_cudal1.judge.sandbox.confine import acts, landlock, seccomp
from torch_cudal1.judge.sandbox.filesystem_policy import allow_access
from torch_cudal1.judge.sandbox.limits import Limits

CPU = torch.device("cpu")
FOREIGN = Limits(CPU, 30.0, trust="foreign", phase="run")

needs_landlock = pytest.mark.skipif(
    not landlock.find_version() or not seccomp.is_supported(),
    reason="no Landlock or no filter here: level 1 only",
)


@needs_landlock
@pytest.mark.parametrize("phase", ["build", "run"])
@pytest.mark.parametrize("trust", ["own", "foreign"])
def test_level_2_comes_out_right(trust: str, phase: str) -> None:
    probed = probe.probe_level(replace(FOREIGN, trust=trust, phase=phase), 2)  # type: ignore[arg-type]
    assert not probed.why
    assert probed.level == 2
    names = {control.name for control in probed.controls}
    assert set(acts.NEEDS) <= names
    assert ("new programs" in names) == (phase == "run")
    assert probed.landlock == landlock.find_version()
    assert len(probed.filter_digest) == 64
    assert (probed.uid == os.getuid()) == (trust == "own" or os.getuid() != 0)


@needs_landlock
def test_level_3_comes_out_right_or_says_why() -> None:
    probed = probe.probe_level(FOREIGN, 3)
    assert probed.level == 3 or "namespace" in probed.why, probed.why


@needs_landlock
@pytest.mark.parametrize("missing", ["no files", "no compiler's files"])
def test_a_need_that_is_not_met_costs_the_level(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Landlock that also shuts out what a child needs: it must not count as confinement."""

    def narrow_access(*args: object, **kwargs: object) -> object:
        access = allow_access(*args, **kwargs)  # type: ignore[arg-type]
        if missing == "no files":
            return replace(
                access,
                read=tuple(
                    path
                    for path in access.read
                    if "lib" in path or "/bin" in path or path in ("/usr", "/proc", sys.base_prefix)
                ),
                write=(),
            )
        return replace(
            access,
            read=(
                *(path for path in access.read if path not in ("/usr", "/bin")),
                "/usr/lib/x86_64-linux-gnu",
            ),
        )

    monkeypatch.setattr("torch_cudal1.judge.sandbox.start.allow_access", narrow_access)
    probed = probe.probe_level(FOREIGN, 2)
    assert probed.level == 0
    assert probed.why


def test_a_probe_is_remembered_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    first = probe.find_levels(FOREIGN)
    monkeypatch.setattr(probe, "probe_level", lambda *_: pytest.fail("tried again"))
    assert probe.find_levels(FOREIGN) is first
