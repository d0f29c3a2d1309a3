"""What the evidence of entries says of a graph of torch.compile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torch_cudal1.api.graphs.graph_evidence import (
    choose_by_evidence,
    has_inductor_in_every_benchmark,
)


def make_choice(schedule: str, candidate_us: float | None = None, **baselines_us: float) -> Any:
    """A choice with its evidence: a kernel where it has a time of its own, else a baseline."""
    timing = {} if candidate_us is None else {"candidate_us": candidate_us}
    return SimpleNamespace(
        swapped=candidate_us is not None,
        candidate=SimpleNamespace(schedule=schedule),
        entry=SimpleNamespace(evidence={"baselines_us": baselines_us, "timing": timing}),
    )


@pytest.mark.parametrize(
    ("choices", "runs"),
    [
        ([make_choice("eager", 8.0, eager=20.0, inductor=10.0)], "swaps"),
        ([make_choice("eager", 9.9, eager=20.0, inductor=10.0)], "inductor"),
        ([make_choice("inductor", eager=20.0, inductor=10.0)], "inductor"),
        ([make_choice("eager", eager=5.0, inductor=10.0)], "eager"),
        ([make_choice("eager", eager=9.9, inductor=10.0)], "inductor"),
        # Inductor was never compiled whole, so nothing says that it is as fast.
        ([make_choice("regional+graph", **{"regional+graph": 5.0, "eager": 9.0})], "swaps"),
        ([make_choice("eager")], "inductor"),
        # A loss in the backward outweighs the forward.
        (
            [
                make_choice("eager", 8.0, inductor=10.0),
                make_choice("eager", 15.0, inductor=10.0),
            ],
            "inductor",
        ),
    ],
)
def test_swaps_run_where_the_whole_is_faster_than_inductor(choices: list[Any], runs: str) -> None:
    assert choose_by_evidence(choices, margin=1.05) == runs


def test_a_benchmark_without_inductor_is_noticed() -> None:
    complete, lacking = make_choice("eager", inductor=1.0), make_choice("eager", eager=1.0)
    assert has_inductor_in_every_benchmark([complete, make_choice("eager")])
    assert not has_inductor_in_every_benchmark([complete, lacking])
