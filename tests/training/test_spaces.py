"""Every kind of operation has wrong programs and cheats."""

from __future__ import annotations

from torch_cudal1.training.ksl.grammar import HACKS
from torch_cudal1.training.ksl.ops import DIMS
from torch_cudal1.training.ksl.spaces import SPACES, list_programs


def test_every_device_has_wrong_values_and_all_cheats_for_every_kind() -> None:
    for device in SPACES:
        for kind in DIMS:
            listed = list_programs(device, kind)
            assert {program.hack for program in listed if program.hack} == set(HACKS)
            assert any(program.knobs.get("mask") == "off" for program in listed)
            assert any(program.knobs.get("acc") == "f16" for program in listed)
