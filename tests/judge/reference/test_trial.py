"""Input sets are drawn once for all candidates of a region, and derived sets share their memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.judge.programs import candidate, linear_relu, subject
from tests.judge.reference.in_process_child import CPU, InProcessChild
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.reference.input_set import ReferenceCache
from torch_cudal1.judge.reference.trial import Trial

REGION = linear_relu()


@pytest.fixture
def child(tmp_path: Path) -> InProcessChild:
    return InProcessChild(tmp_path)


def make_trial(child: Any, cache: ReferenceCache | None = None, **fields: Any) -> Trial:
    reference_cache = {} if cache is None else cache
    return Trial(
        subject(REGION),
        candidate(REGION.program),
        Contract(),
        CPU,
        child,
        reference_cache=reference_cache,
        **fields,
    )


def test_the_next_candidate_meets_the_same_sets_in_the_same_order(child: InProcessChild) -> None:
    cache: ReferenceCache = {}
    first, second = make_trial(child, cache), make_trial(child, cache)
    sets = [first.draw("normal"), first.draw("normal"), first.draw("shifted")]
    assert len({sample.name for sample in sets}) == 3
    assert not torch.equal(sets[0].inputs[0], sets[1].inputs[0])
    assert [second.draw(kind) for kind in ("normal", "normal", "shifted")] == sets
    assert all(sample.is_shared for sample in sets)
    unrelated = make_trial(child)
    assert unrelated.draw("normal").name not in {sample.name for sample in sets}


def test_without_room_a_set_serves_one_candidate_only(
    child: InProcessChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_cudal1.judge.reference.trial.max_cached_bytes", lambda device: 0)
    trial = make_trial(child)
    assert not trial.draw("normal").is_shared
    assert not trial.reference_cache


def test_the_users_own_examples_are_copied(child: InProcessChild) -> None:
    examples = [torch.randn(spec.shape) for spec in REGION.program.inputs]
    sample = make_trial(child, examples=examples).draw("examples")
    assert all(map(torch.equal, sample.inputs, examples))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(sample.inputs, examples, strict=True))


def test_a_derived_set_shares_what_did_not_change_and_is_made_once(child: InProcessChild) -> None:
    trial = make_trial(child)
    base, calls = trial.draw("normal"), []

    def double_bias(inputs: Any) -> list[torch.Tensor | None]:
        calls.append(1)
        return [None, None, 2 * inputs[2]]

    derived = [trial.derive(base, "doubled bias", double_bias) for _ in range(2)]
    assert derived[0] is derived[1]
    assert len(calls) == 1
    assert derived[0].inputs[0] is base.inputs[0]
    assert torch.equal(derived[0].inputs[2], 2 * base.inputs[2])
    derived_there, base_there = child.session.sets[derived[0].name], child.session.sets[base.name]
    assert [a is b for a, b in zip(derived_there, base_there, strict=True)] == [True, True, False]


def test_a_sibling_has_new_inputs_and_the_same_parameters(child: InProcessChild) -> None:
    trial = make_trial(child)
    base = trial.draw("normal")
    sibling = trial.derive_sibling(base)
    same = [a is b for a, b in zip(base.inputs, sibling.inputs, strict=True)]
    assert same == [False, True, True]
    assert trial.derive_sibling(base) is sibling
    assert trial.derive_sibling(base, number=1) is not sibling


def test_replaced_inputs_are_of_this_candidate_alone(child: InProcessChild) -> None:
    trial = make_trial(child)
    base = trial.draw("normal")
    count = len(trial.reference_cache)
    changed = trial.replace_inputs(base, {0: torch.zeros_like(base.inputs[0])}, "zeros")
    assert changed.distribution == "zeros"
    assert not changed.inputs[0].any()
    assert changed.inputs[1] is base.inputs[1]
    assert len(trial.reference_cache) == count


def test_another_slot_starts_without_results_and_without_examples_of_another_form(
    child: InProcessChild,
) -> None:
    examples = [torch.randn(spec.shape) for spec in REGION.program.inputs]
    trial = make_trial(child, examples=examples)
    trial.load("candidate", trial.candidate)
    sample = trial.draw("normal")
    trial.results[sample.name] = trial.run(sample)
    other = trial.load_in_slot(trial.reference, "beside it")
    assert (other.slot, other.samples, other.results, other.drawn) == ("beside it", {}, {}, {})
    assert set(child.session.slots) == {"candidate", "beside it"}
    half = replace(REGION.program.inputs[0], shape=(16, 48))
    inputs = (half, *REGION.program.inputs[1:])
    narrower = subject(replace(REGION, program=replace(REGION.program, inputs=inputs)))
    fitting = trial.load_in_slot(narrower, "narrower").examples
    assert fitting is not None
    assert [tensor is None for tensor in fitting] == [True, False, False]


@pytest.mark.parametrize(("budget_s", "expected"), [(1e9, 5), (0.0, 1)])
def test_a_budget_affords_between_one_and_the_wanted_number_of_sets(
    child: InProcessChild, budget_s: float, expected: int
) -> None:
    trial = make_trial(child)
    trial.profile = replace(trial.profile, budget_s=budget_s)
    assert trial.count_affordable_sets(5) == expected


def test_the_first_two_sets_are_those_that_were_drawn_first(child: InProcessChild) -> None:
    trial = make_trial(child)
    drawn = [trial.draw(kind) for kind in ("normal", "shifted", "uniform")]
    assert trial.first_two == (drawn[0], drawn[1])
