"""Mutants are the same for the same number, their twins are right, and what they do is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.siege.faults import KINDS, Mutant, make_mutant


def construct(text: str, entry: str, arguments: list[Any]) -> nn.Module:
    names: dict[str, Any] = {}
    exec(compile(text, "<source>", "exec"), names)
    module: nn.Module = names[entry](*arguments)
    return module.eval()


def read_reference(mutant: Mutant) -> tuple[nn.Module, list[Any], list[Any]]:
    names: dict[str, Any] = {}
    exec(compile(mutant.subject.write_reference(), "<reference>", "exec"), names)
    arguments = names["get_init_inputs"]()
    return names["Model"](*arguments).eval(), names["get_inputs"](), arguments


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_makes_one_mutant_and_its_twin_computes_what_the_reference_does(kind: str) -> None:
    mutants = [make_mutant(kind, number) for number in range(4)]
    assert [make_mutant(kind, number) for number in range(4)] == mutants
    assert len({mutant.text for mutant in mutants}) > 1
    for mutant in mutants:
        reference, inputs, arguments = read_reference(mutant)
        assert mutant.text != mutant.twin
        assert mutant.twin is not None
        twin = construct(mutant.twin, "ModelNew", arguments)
        twin.load_state_dict(reference.state_dict())
        # The mutant itself can be constructed with the reference's state too.
        construct(mutant.text, "ModelNew", arguments).load_state_dict(reference.state_dict())
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(twin(*inputs), reference(*inputs))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("train mode", lambda module, inputs: (module.train(), inputs)),
        (
            "another batch",
            lambda module, inputs: (module, [torch.cat([inputs[0], inputs[0]]), *inputs[1:]]),
        ),
        (
            "half precision",
            lambda module, inputs: (module.bfloat16(), [inputs[0].bfloat16(), *inputs[1:]]),
        ),
        ("large values", lambda module, inputs: (module, [1000 * inputs[0], *inputs[1:]])),
    ],
)
def test_a_mutant_is_wrong_where_its_kind_says(kind: str, change: Any) -> None:
    number = next(
        number
        for number in range(500)
        if make_mutant(kind, number).subject.name == "linear"
        and "roll" in make_mutant(kind, number).damage
    )
    mutant = make_mutant(kind, number)
    reference, inputs, arguments = read_reference(mutant)
    module = construct(mutant.text, "ModelNew", arguments)
    module.load_state_dict(reference.state_dict())
    with torch.no_grad():
        assert torch.equal(module(*inputs), reference(*inputs))
        changed, others = change(module, inputs)
        expected, _ = change(reference, inputs)
        assert not torch.allclose(changed(*others), expected(*others))


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(KeyError):
        make_mutant("no such kind", 0)
