"""Records of a guard hold what a compiled program relies on, and nothing that may change freely."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.runtime.guard_cases import StatefulBlock, make_model
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.runtime.guard_builder import record_module
from torch_cudal1.runtime.guard_comparison import PythonGuard, iter_differences
from torch_cudal1.runtime.guard_records import (
    FACTS,
    DictContents,
    GuardRecords,
    drop_state,
    filter_names,
    read_tensor_facts,
)


def read_fact(tensor: torch.Tensor, name: str) -> object:
    return read_tensor_facts(tensor)[FACTS.index(name)]


@pytest.mark.parametrize(
    ("tensor", "address"),
    [
        (torch.zeros(8), "aligned"),
        (torch.zeros(8)[4:], "aligned"),
        (torch.zeros(8)[1:], "unaligned"),
        (torch.zeros(0), "none"),
        (torch.zeros(2, device="meta"), "none"),
    ],
)
def test_of_an_address_only_its_alignment_to_16_bytes_is_recorded(
    tensor: torch.Tensor, address: str
) -> None:
    assert read_fact(tensor, "address") == address


def test_facts_have_names_and_distinguish_lazy_bits() -> None:
    values = torch.ones(2, dtype=torch.complex64)
    assert len(read_tensor_facts(values)) == len(FACTS)
    assert read_fact(values.conj(), "conjugate bit") is True
    assert read_fact(values.conj().imag, "negative bit") is True
    assert read_fact(values, "conjugate bit") is read_fact(values, "negative bit") is False


def test_facts_do_not_depend_on_values_or_on_which_memory_holds_them() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    before = read_tensor_facts(weight)
    weight.data = torch.zeros(4, 4)
    assert read_tensor_facts(weight) == before


def test_an_environment_is_recorded_by_the_names_that_do_not_begin_with_the_prefix() -> None:
    table = {b"HOME": 1, b"TORCHINDUCTOR_CACHE_DIR": 2}
    assert filter_names(table, b"TORCHINDUCTOR_") == (b"HOME",)
    record = DictContents.of_names("environment", "variable", table, ignored_prefix=b"TORCHIND")
    guard = PythonGuard(GuardRecords((), (), (record,), (), (), (), (), (), (), ()))
    table[b"TORCHINDUCTOR_OTHER"] = table[b"HOME"] = 3
    assert guard.holds()
    table[b"PATH"] = 4
    assert not guard.holds()
    assert "PATH" in next(iter_differences(guard._watched))


def test_empty_records_always_hold() -> None:
    assert PythonGuard(GuardRecords.make_empty()).holds()


def test_without_state_a_call_may_change_the_module_but_its_class_stays_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = make_model()
    records = record_module(module)
    assert not isinstance(records, Refusal)
    guard, full_guard = PythonGuard(drop_state(records)), PythonGuard(records)
    module.first.scale = 2.0
    module.first.sizes.append(3)
    module.first.mean = torch.ones(4)
    assert guard.holds()
    assert not full_guard.holds()
    hook = module.first.register_forward_hook(print)
    assert not guard.holds()
    hook.remove()
    assert guard.holds()
    monkeypatch.setattr(StatefulBlock, "step", lambda self, x: x)
    assert not guard.holds()
