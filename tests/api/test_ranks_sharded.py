"""FSDP2, tensor parallelism and DTensors on two ranks (gloo): right answers, one choice, and a
reason where nothing is swapped.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.rank_crew import crew

HOOKS = "hooks are registered; they run only through a plain module call"
# scene, and what the reason for running the module's own forward says
LEFT_OUT = {
    "fully_sharded": HOOKS,
    "tensor_parallel": HOOKS,
    "tensor_parallel_compiled": "_c10d_functional.",  # a collective is no operator of a Program
    "distributed_tensors": "an argument is not a plain tensor",
}


def check_data_parallel(outcomes: list[dict[str, Any]]) -> None:
    """Every rank runs the first one's choice, by digest, in inference and in a training step inside
    DDP.
    """
    first, *other_ranks = (rank["data_parallel"] for rank in outcomes)
    assert first["digests"]
    assert first["shift"] == 1.0
    assert first["graphs"] == [2]  # a forward and a backward
    for other in other_ranks:
        assert other["digests"] == first["digests"]
        assert (other["shift"], other["graphs"]) == (1.0, [2])
        assert other["gradient"] == pytest.approx(first["gradient"])


def check(outcomes: list[dict[str, Any]]) -> None:
    """What every crew must have seen, whatever its size."""
    for number, rank in enumerate(outcomes):
        assert {name for name, scene in rank.items() if not scene.get("right", True)} == set()
        assert {name for name, scene in rank.items() if not scene.get("gradients", True)} == set()
        for scene, reason in LEFT_OUT.items():
            if number and scene.endswith("compiled"):
                continue  # the others were told to run Inductor, and looked no further
            assert any(reason in text for text in rank[scene]["reasons"]), (
                scene,
                rank[scene]["reasons"],
            )
        assert (
            rank["distributed_tensors_compiled"]["swapped"] == 0
        )  # its reason differs between versions of torch
        assert rank["sharded_after_it_was_accelerated"]["before"] == 1.0
        assert rank["sharded_after_it_was_accelerated"]["misses"] > 0
        assert rank["blocks_compiled_and_sharded"]["swapped"] > 0
        assert rank["blocks_compiled_and_sharded"]["agreed"] > 0
        assert (
            "parameter first.weight is a DTensor" in rank["distributed_tensors"]["of_parameters"][0]
        )


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return crew(2, tmp_path_factory.mktemp("sharded"), "cpu")


def test_ranks_in_ddp_run_what_the_first_one_knows(outcomes):
    check_data_parallel(outcomes)


def test_sharded_models_give_right_answers_by_one_choice_or_by_the_baseline_with_a_reason(outcomes):
    check(outcomes)


def test_untuned_ranks_run_what_the_first_one_measured(outcomes):
    first, second = (rank["untuned"] for rank in outcomes)
    assert first["runs"] == second["runs"] == ["inductor"]
    assert (first["measured"] > 0, second["measured"]) == (True, 0)
    # An inference call, a graph of torch.compile, a training step.
    assert first["agreed"] == second["agreed"]
    assert len(first["agreed"]) == 3


def test_what_is_decided_for_a_block_runs_on_every_rank_of_a_sharded_model(outcomes):
    first, second = (rank["blocks_compiled_and_sharded"] for rank in outcomes)
    assert (first["swapped"], first["agreed"]) == (second["swapped"], second["agreed"])
