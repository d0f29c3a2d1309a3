from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from torch_cudal1.ingest.llm.database import Database, DatabaseView, StoredSample
from torch_cudal1.ingest.llm.selectors import (
    SELECTORS,
    Buckets,
    Islands,
    make_selector,
    select_exemplars,
)
from torch_cudal1.judge.pool.measured import Measured


def view_of(scores: list[float], task: str = "t", generations: int = 1) -> DatabaseView:
    database = Database(None)
    for index, score in enumerate(scores):
        database.add(StoredSample(str(index), Measured(task, f"program {index}", "ok", score)))
        if (index + 1) % math.ceil(len(scores) / generations) == 0:
            database.commit()
    database.commit()
    return database.view()


SPREAD = [0.5, 0.52, 0.9, 1.0, 1.1, 1.5, 1.9, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("name", SELECTORS)
def test_every_selector_is_a_pure_function(name: str) -> None:
    view = view_of(SPREAD)
    chosen = make_selector(name)
    for seed in range(20):
        assert select_exemplars(chosen, seed, "t", view) == select_exemplars(
            chosen, seed, "t", view
        )
    assert select_exemplars(chosen, 0, "unknown task", view) == ()


@pytest.mark.parametrize("name", ["random", "bucket", "island"])
def test_other_seeds_tasks_and_generations_draw_otherwise(name: str) -> None:
    database = Database(None)
    for index, score in enumerate(SPREAD * 3):
        for task in ("t", "u"):
            database.add(
                StoredSample(
                    f"{task}{index}",
                    Measured(task, f"program {index}", "ok", score * (1 + index / 100)),
                )
            )
    database.commit()
    first = database.view()
    database.add(StoredSample("of another task", Measured("v", "program", "ok", 1.0)))
    database.commit()
    chosen = make_selector(name)
    drawn = [select_exemplars(chosen, seed, "t", first) for seed in range(20)]
    assert len(set(drawn)) > 10
    assert drawn != [select_exemplars(chosen, seed, "u", first) for seed in range(20)]
    assert drawn != [select_exemplars(chosen, seed, "t", database.view()) for seed in range(20)]


def test_two_ranks_draw_the_same(tmp_path: Path) -> None:
    path = tmp_path / "db.jsonl"
    with Database(path) as database:
        for index, score in enumerate(SPREAD):
            database.add(StoredSample(str(index), Measured("t", f"program {index}", "ok", score)))
        database.commit()
    code = """
import json, sys
from pathlib import Path
from torch_cudal1.ingest.llm.database import Database
from torch_cudal1.ingest.llm.selectors import SELECTORS, make_selector, select_exemplars
view = Database(Path(sys.argv[1]), write=False).view()
print(json.dumps([[[e.program, e.score] for e in select_exemplars(make_selector(n), s, "t", view)] for n in SELECTORS for s in range(30)]))
"""
    drawn = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", code, str(path)],
                env={**os.environ, "PYTHONHASHSEED": salt},
                capture_output=True,
                check=True,
                timeout=120,
            ).stdout
        )
        for salt in ("1", "2")
    ]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 30 * len(SELECTORS)


@pytest.mark.parametrize("name", ["random", "bucket", "island", "top"])
def test_exemplars_are_shown_worst_to_best_and_are_different_programs(name: str) -> None:
    view = view_of(SPREAD)
    for seed in range(50):
        shown = select_exemplars(make_selector(name), seed, "t", view)
        assert [each.score for each in shown] == sorted(each.score for each in shown)
        assert len({each.program for each in shown}) == len(shown) <= 2
    orders = {
        select_exemplars(make_selector(name), seed, "t", view, shuffled=True) for seed in range(50)
    }
    assert any(each[0].score > each[-1].score for each in orders if len(each) == 2)


def test_buckets_are_distinct() -> None:
    chosen = Buckets()
    view = view_of(SPREAD)
    home = {
        entry.program: index
        for index, (_, members) in enumerate(chosen.buckets(view.entries("t")))
        for entry in members
    }
    for seed in range(200):
        shown = select_exemplars(chosen, seed, "t", view)
        assert len({home[each.program] for each in shown}) == 2


def test_equal_scores_are_one_bucket_and_so_one_exemplar() -> None:
    assert len(select_exemplars(Buckets(), 0, "t", view_of([1.0] * 6))) == 1
    assert len(select_exemplars(Buckets(), 0, "t", view_of([1.0]))) == 1


def test_buckets_are_drawn_as_equation_1_says() -> None:
    chosen = Buckets(count=1, tau=0.7)
    view = view_of(SPREAD)
    buckets = chosen.buckets(view.entries("t"))
    weights = [math.exp(mean / chosen.tau) for mean, _ in buckets]
    home = {entry.program: index for index, (_, members) in enumerate(buckets) for entry in members}
    draws = 4_000
    counts = Counter(
        home[select_exemplars(chosen, seed, "t", view)[0].program] for seed in range(draws)
    )
    for index, weight in enumerate(weights):
        p = weight / sum(weights)
        assert abs(counts[index] / draws - p) < 5 * math.sqrt(p * (1 - p) / draws)


def test_units_of_scores_do_not_matter_to_buckets() -> None:
    chosen = Buckets()
    slow, fast = view_of(SPREAD), view_of([1_000 * score for score in SPREAD])
    for seed in range(30):
        programs = [
            [each.program for each in select_exemplars(chosen, seed, "t", view)]
            for view in (slow, fast)
        ]
        assert programs[0] == programs[1]


def test_faster_programs_are_shown_more_often_by_buckets_and_not_by_chance() -> None:
    view = view_of(SPREAD)

    def mean_score(name: str) -> float:
        shown = [
            each.score
            for seed in range(400)
            for each in select_exemplars(make_selector(name), seed, "t", view)
        ]
        return sum(shown) / len(shown)

    assert mean_score("bucket") > 1.2 * mean_score("random")


def test_top_shows_the_fastest() -> None:
    assert [
        each.score for each in select_exemplars(make_selector("top"), 0, "t", view_of(SPREAD))
    ] == [
        3.0,
        4.0,
    ]


def test_sub_populations_evolve_separately_until_the_weaker_half_starts_again() -> None:
    scores = [1 + index / 10 for index in range(40)]
    early = view_of(scores, generations=4)
    populations = Islands(period=100).population("t", early)
    assert sum(map(len, populations)) == 40
    assert len({entry.program for home in populations for entry in home}) == 40
    later = Islands(period=2).population("t", early)
    best = max(entry.score for home in populations for entry in home if entry.since <= 4)
    assert sum(map(len, later)) < 40
    assert (
        sum(home[-1].score == best for home in later) > 1
    )  # the best one founded another sub-population


def test_failures_are_never_shown() -> None:
    database = Database(None)
    for index, outcome in enumerate(("wrong", "hack", "compile", "run", "unstable", "undecodable")):
        database.add(StoredSample(str(index), Measured("t", f"bad {index}", outcome)))  # type: ignore[arg-type]
    database.commit()
    for name in SELECTORS:
        assert select_exemplars(make_selector(name), 0, "t", database.view()) == ()


def test_nonsense_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match="selector 'best'; expected one of none, random, bucket, island, top"
    ):
        make_selector("best")
    with pytest.raises(ValueError, match="tau"):
        make_selector("random", tau=3)
    with pytest.raises(ValueError, match="tau and width above 0"):
        make_selector("bucket", tau=0)
