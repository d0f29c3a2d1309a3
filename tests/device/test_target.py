"""Which Target a device is, and what the user's flags permit."""

from __future__ import annotations

import pytest
import torch

from torch_cudal1.core.settings import Settings
from torch_cudal1.device import target


def test_a_cpu_has_no_driver_and_names_its_versions() -> None:
    answer = target.target_for(torch.device("cpu"))
    assert (answer.device, answer.driver, answer.torch) == ("cpu", "", torch.__version__)
    assert answer.family == f"cpu-{answer.arch}"


@pytest.mark.parametrize(("precision", "rights"), [("match", ("matmul",)), ("strict", ())])
def test_tf32_is_permitted_where_the_flags_and_the_contract_permit_it(
    monkeypatch: pytest.MonkeyPatch, precision: str, rights: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = True, False
    try:
        contract = target.contract_for(Settings(precision=precision))  # type: ignore[arg-type]
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    assert contract.rights == rights


def test_the_identity_of_a_machine_is_the_same_each_time_and_does_not_name_it() -> None:
    identity = target.judge_identity()
    assert identity == target.judge_identity() == target.make_attestation()["judge"]
    assert len(identity) == 16
    assert int(identity, 16) >= 0
