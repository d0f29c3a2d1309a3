"""Two ranks on CPU (gloo) run the same choice or both their baseline, and nobody hangs. One pair of
processes plays all scenes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from torch_cudal1.api.ranks import consensus

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw in each scene."""
    folder = tmp_path_factory.mktemp("ranks")
    store = dist.TCPStore(
        "127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=900)
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TORCH_CUDAL1_")
    } | {"TORCH_CUDAL1_ON_MISS": "baseline"}
    environment |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }  # no name of this host needs to be known
    commands = [
        [sys.executable, "-m", "tests.api.rank_scenes", str(rank), str(store.port), str(folder)]
        for rank in (0, 1)
    ]
    running = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    try:
        errors = [process.communicate(timeout=900)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(
        error[-3000:] for error in errors
    )
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in (0, 1)]


def both(outcomes: list[dict[str, Any]], scene: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return outcomes[0][scene], outcomes[1][scene]


def test_a_rank_without_the_entry_gets_it_from_the_first_and_writes_it_nowhere(outcomes):
    first, second = both(outcomes, "only_the_first_knows")
    assert first["digests"] == second["digests"] != []
    assert (first["shift"], second["shift"]) == (1.0, 1.0)
    assert second["stored"] == 0


def test_where_caches_differ_the_first_rank_s_choice_runs_on_all(outcomes):
    first, second = both(outcomes, "both_know_something_else")
    assert first["digests"] == second["digests"] != []
    assert (first["shift"], second["shift"]) == (1.0, 1.0)


def test_without_agreement_they_would_have_differed(outcomes):
    first, second = both(outcomes, "without_agreement")
    assert first["digests"] != second["digests"]
    assert (first["shift"], second["shift"]) == (1.0, 2.0)


def test_what_only_another_rank_knows_runs_nowhere(outcomes):
    first, second = both(outcomes, "only_the_second_knows")
    assert (first["shift"], second["shift"]) == (0.0, 0.0)
    assert second["reason"] == "rank 0 decides, and has none: no cached decision"


def test_a_cache_that_cannot_be_written_is_no_obstacle(outcomes):
    first, second = both(outcomes, "a_cache_that_cannot_be_written")
    assert first["digests"] == second["digests"] != []
    assert second["shift"] == 1.0


def test_an_entry_may_come_in_many_pieces(outcomes):
    first, second = both(outcomes, "in_many_pieces")
    assert first["digests"] == second["digests"] != []


@pytest.mark.parametrize(
    ("scene", "reason"),
    [
        ("judged_on_another_machine", "rank 1: judged elsewhere: sku"),
        ("quarantined_on_one", "rank 1: quarantined"),
        ("under_another_contract", "rank 1 works under another precision contract"),
        ("damaged_on_the_way", "rank 1: an entry of rank 0 is unreadable"),
        ("too_large_to_hand_on", "at most 10 are handed to other ranks"),
    ],
)
def test_what_one_rank_may_not_run_runs_on_none(outcomes, scene, reason):
    for rank in both(outcomes, scene):
        assert rank["shift"] == 0.0
        assert reason in rank["reason"]


def test_a_decision_that_must_be_there_and_is_not_is_an_error_on_every_rank(outcomes):
    assert all("Net.inference" in rank["error"] for rank in both(outcomes, "nobody_knows_and_must"))
    took = [rank["took"] for rank in both(outcomes, "nobody_knows_and_must")]
    assert max(took) < 450  # the first one's error ends the waiting, of 900 s


def test_a_rank_with_another_graph_is_noticed_and_nobody_waits_for_it(outcomes):
    first, second = both(outcomes, "another_graph")
    assert (first["others"], second["others"]) == ([[1]], [[0]])
    assert (first["shift"], second["shift"]) == (1.0, 1.0)  # each by its own decision
    assert first["digests"] != second["digests"]


def test_who_waits_in_vain_takes_the_baseline_and_so_does_who_comes_too_late(outcomes):
    first, second = both(outcomes, "one_comes_too_late")
    assert (first["shift"], second["shift"]) == (0.0, 0.0)
    assert (
        first["reason"]
        == second["reason"]
        == "ranks do not agree: only ranks [0] of 2 came within 0.3 s"
    )


def test_a_missed_meeting_does_not_spoil_the_next(outcomes):
    first, second = both(outcomes, "and_the_next_time_both_come")
    assert first["digests"] == second["digests"] != []


def test_a_module_inside_ddp_trains_by_the_same_choice(outcomes):
    first, second = both(outcomes, "data_parallel")
    assert first["gradient"] == pytest.approx(second["gradient"])
    assert first["runs"] == second["runs"] > 0


def test_every_graph_into_which_ddp_splits_a_model_is_agreed_upon(outcomes):
    first, second = both(outcomes, "data_parallel_compiled")
    assert first["graphs"] > 1
    assert first["agreed"] == first["graphs"]
    assert first["swapped"] == second["swapped"] > 0
    assert first["mean"] == pytest.approx(second["mean"])


def test_a_process_alone_asks_nobody():
    assert consensus._store() is None
