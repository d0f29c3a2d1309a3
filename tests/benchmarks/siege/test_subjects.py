"""The references run, and what is said of them is so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.siege.subjects import SUBJECTS, Subject


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_a_subject_is_what_it_says(subject: Subject) -> None:
    names: dict[str, Any] = {}
    exec(compile(subject.write_reference(), "<reference>", "exec"), names)
    module, inputs = names["Model"](*names["get_init_inputs"]()).eval(), names["get_inputs"]()
    assert bool(list(module.parameters())) == subject.has_weights
    assert torch.is_floating_point(inputs[0])
    others = [
        place
        for place, value in enumerate(inputs)
        if not (isinstance(value, torch.Tensor) and value.is_floating_point())
    ]
    assert others == ([] if subject.remembers is None else [subject.remembers])
    with torch.no_grad():
        result = module(*inputs)
        inputs[0][0] += 1.0
        changed = (module(*inputs) != result).reshape(len(result), -1).any(1)
    if subject.is_pointwise:
        assert changed.tolist() == [True] + [False] * (len(result) - 1)
