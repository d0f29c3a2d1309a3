"""An answer depends on the call alone, whatever was called before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.judge.checks.module_sources import ModuleBench, ModuleCase
from torch_cudal1.judge.checks.history import (
    CALL_HISTORY,
    REPEAT,
    _change_one_element,
    _make_scaler,
    _map_inputs,
    _split_outputs,
)
from torch_cudal1.judge.sandbox.child import CandidateFailure


def change_one(inputs: list[torch.Tensor], *, last: bool, part: float) -> list[torch.Tensor]:
    def derive(
        base: Any,
        kind: str,
        make: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]],
    ) -> list[torch.Tensor]:
        return [old if new is None else new for old, new in zip(inputs, make(inputs), strict=True)]

    roles = ("input",) * (len(inputs) - 1) + ("parameter",)
    trial: Any = SimpleNamespace(reference=SimpleNamespace(roles=roles), derive=derive)
    changed_inputs: Any = _change_one_element(
        trial, SimpleNamespace(inputs=inputs), "", last=last, part=part
    )  # type: ignore[arg-type]
    return changed_inputs


def test_the_last_element_moves_by_a_share_of_the_rms() -> None:
    x, weight = torch.ones(4, 5).t(), torch.ones(3)
    moved, same = change_one([x, weight], last=True, part=0.1)
    assert same is weight
    assert moved.stride() == x.stride()
    difference = moved - x
    assert int((difference != 0).sum()) == 1
    assert float(difference[-1, -1]) == pytest.approx(0.1)


def test_without_a_share_one_bit_flips() -> None:
    x = torch.full((8,), 1.0)
    moved, _ = change_one([x, torch.ones(1)], last=False, part=0.0)
    (value,) = moved[moved != 1.0]
    assert float(value) == 1.0 + 2.0**-23


def test_factors_reach_plain_inputs_only() -> None:
    trial: Any = SimpleNamespace(reference=SimpleNamespace(roles=("input", "parameter")))
    scaled, same = _map_inputs(trial, _make_scaler(-2.0))([torch.ones(2, 3).t(), torch.ones(3)])
    assert same is None
    assert scaled is not None
    assert torch.equal(scaled, torch.full((3, 2), -2.0))


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"found": [[2, 1], [0, 1]]},
        {"found": [[-1, 1], [0, 1]]},
        {"found": [[0, 2]]},
        {"found": [[0, 1]]},
        {"found": [0, 1]},
        {"found": [["a", 1], [0, 1]]},
    ],
)
def test_an_answer_that_does_not_fit_is_the_candidates_failure(answer: dict[str, Any]) -> None:
    samples: Any = [SimpleNamespace(expected=SimpleNamespace(outputs=[None])) for _ in range(2)]
    flat: list[torch.Tensor | None] = [torch.zeros(1), torch.ones(1)]
    with pytest.raises(CandidateFailure) as caught:
        list(_split_outputs(answer, flat, samples))
    assert caught.value.detector == "protocol"
    good = list(_split_outputs({"found": [[1, 1], [0, 1]]}, flat, samples))
    assert [sample is samples[0] for sample, _ in good] == [False, True]
    assert [outputs[0] is tensor for (_, outputs), tensor in zip(good, flat, strict=True)] == [
        True,
        True,
    ]


STORE = "self.kept = {}"
KEPT = "self.kept.setdefault(key, self.plain(x, y)).clone()"
ROUGHLY = """
if self.last is None or self.last[0].shape != x.shape or not torch.allclose(self.last[0], x + y, atol=1e-6):
    self.last = x + y, self.plain(x, y)
"""
NINTH = "self.calls += 1\nself.kept = self.plain(x, y) if self.calls < 9 or self.kept.shape != x.shape else self.kept"
MODULES: dict[str, ModuleCase] = {
    "a result by address": (
        {"init": STORE, "before": "key = x.data_ptr(), y.data_ptr(), x.shape", "result": KEPT},
        "fast",
        (CALL_HISTORY,),
        "call_history",
    ),
    "a result by its first sixteen values": (
        {
            "init": STORE,
            "before": "key = str(x.flatten()[:16].tolist() + y.flatten()[:16].tolist())",
            "result": KEPT,
        },
        "fast",
        (CALL_HISTORY,),
        "call_history",
    ),
    "a result by rough equality": (
        {
            "init": "self.last = None",
            "before": ROUGHLY,
            "result": "self.last[1].clone()",
        },
        "standard",
        (CALL_HISTORY,),
        "call_history",
    ),
    "everything after the eighth call is old": (
        {
            "init": "self.calls, self.kept = 0, None",
            "before": NINTH,
            "result": "self.kept.clone()",
        },
        "fast",
        (CALL_HISTORY,),
        "call_history",
    ),
    "the sign of the first inputs decides": (
        {
            "init": "self.positive = None",
            "before": "self.positive = bool(x.sum() > 0) if self.positive is None else self.positive",
            "result": "self.plain(x, y) * (1.0 if self.positive == bool(x.sum() > 0) else 1.001)",
        },
        "fast",
        (CALL_HISTORY,),
        "call_history",
    ),
    "the caller's copy is the cache": (
        {
            "init": "self.kept = None, None",
            "before": "if self.kept[0] is None or not torch.equal(self.kept[0], x + y):\n    self.kept = x + y, self.plain(x, y)",
            "result": "self.kept[1]",
        },
        "fast",
        (CALL_HISTORY,),
        "call_history",
    ),
    "counts its calls, harmlessly": (
        {"init": "self.calls = 0", "before": "self.calls += 1"},
        "standard",
        (CALL_HISTORY,),
        None,
    ),
    "noise": (
        {"result": "self.plain(x, y) * (1 + 3e-7 * torch.rand(1))"},
        "fast",
        (REPEAT,),
        "repeat",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_source_that_answers_by_its_history_is_refused_and_an_honest_source_passes(
    module_bench: ModuleBench, name: str
) -> None:
    module_bench.assert_verdict(MODULES[name])
