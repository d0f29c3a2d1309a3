"""Requests to a candidate's process, and answers that are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.judge.programs import candidate, linear_relu, subject
from tests.judge.reference.in_process_child import CPU, InProcessChild
from torch_cudal1.ir.records import Contract
from torch_cudal1.ir.schedule import EAGER
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure

REGION = linear_relu()


@pytest.fixture
def child(tmp_path: Path) -> InProcessChild:
    return InProcessChild(tmp_path)


@pytest.fixture
def trial(child: InProcessChild) -> Trial:
    in_process: Any = child
    trial = Trial(subject(REGION), candidate(REGION.program), Contract(), CPU, in_process)
    trial.load("candidate", trial.candidate)
    return trial


def test_a_call_answers_outputs_and_leaves_no_file(trial: Trial, child: InProcessChild) -> None:
    sample = trial.draw("normal")
    files = set(child.session.scratch.iterdir())
    result = trial.run(sample)
    assert sample.expected.outputs[0] is not None
    assert result.outputs[0] is not None
    torch.testing.assert_close(result.outputs[0], sample.expected.outputs[0])
    assert len(result.facts) == 1
    assert child.session.held == []
    trial.run(sample, hold=True)
    assert len(child.session.held) == 1
    assert set(child.session.scratch.iterdir()) == files, "files may be memory of the host"


@pytest.mark.parametrize(
    ("change", "detector", "reason"),
    [
        (lambda answer: answer | {"facts": None}, "protocol", "properties"),
        (lambda answer: answer | {"facts": [None, None]}, "protocol", "properties"),
        (lambda answer: answer | {"layout": []}, "fresh_output", "0 outputs, expected 1"),
        (lambda answer: answer | {"layout": "much"}, "protocol", "unreadable outputs"),
        (lambda answer: answer | {"layout": [["float32", [9**9], [1]]]}, "protocol", "unreadable"),
    ],
    ids=["no properties", "too many properties", "no output", "no layout", "a layout beyond"],
)
def test_an_answer_that_is_none_fails_the_candidate(
    trial: Trial,
    child: InProcessChild,
    change: Callable[[dict[str, Any]], dict[str, Any]],
    detector: str,
    reason: str,
) -> None:
    sample = trial.draw("normal")
    child.changes["run"] = change
    with pytest.raises(CandidateFailure, match=reason) as error_info:
        trial.run(sample)
    assert error_info.value.detector == detector


def test_an_input_that_the_candidate_wrote_to_is_found_by_its_position(
    trial: Trial, child: InProcessChild
) -> None:
    sample = trial.draw("normal")
    assert trial.find_changed_inputs(sample) == []
    child.session.sets[sample.name][1][0, 0] += 1.0
    assert trial.find_changed_inputs(sample) == [1]
    child.changes["reread"] = lambda answer: answer | {"layout": answer["layout"][:1]}
    assert trial.find_changed_inputs(sample) is None


def test_new_values_are_written_there_and_the_set_here_stays(
    trial: Trial, child: InProcessChild
) -> None:
    sample = trial.draw("normal")
    before = sample.inputs[2].clone()
    trial.rewrite(sample, [None, None, torch.full_like(before, 7.0)])
    assert bool((child.session.sets[sample.name][2] == 7.0).all())
    assert torch.equal(sample.inputs[2], before)


def test_a_set_that_was_evicted_is_sent_again_without_what_its_base_has(
    trial: Trial, child: InProcessChild
) -> None:
    base = trial.draw("normal")
    sibling = trial.derive_sibling(base)
    assert child.sent_positions[sibling.name] == [0], "parameters are the base's"
    trial.input_cache.forget(sibling.name)
    trial.input_cache.bases[sibling.name] = base.name
    child.session.sets.pop(sibling.name)
    child.sent_positions.clear()
    trial.run(sibling)
    assert child.sent_positions == {sibling.name: [0]}
    child.sent_positions.clear()
    trial.run(sibling)
    assert child.sent_positions == {}


def test_dropped_sets_are_gone_on_both_sides(trial: Trial, child: InProcessChild) -> None:
    first, second = trial.draw("normal"), trial.draw("shifted")
    trial.drop(first)
    assert list(trial.samples) == list(child.session.sets) == [second.name]
    assert not trial.input_cache.mark_used(first.name)


def test_the_reference_is_loaded_once_under_each_schedule(
    trial: Trial, child: InProcessChild
) -> None:
    sample = trial.draw("normal")
    child.verbs.clear()
    for _ in range(2):
        (output,) = trial.run_reference_in_child(EAGER, sample)
        assert output is not None
    assert child.verbs.count("load") == 1
