"""The overhead benchmark measures what it names, keeps failures as rows, and draws its conclusions
from its rows alone.
"""

from __future__ import annotations

import json
import time
import weakref
from pathlib import Path

import torch

from benchmarks.bench_overhead import (
    OverheadRow,
    Relu,
    _make_holding_call,
    main,
    measure,
    measure_group,
    summarise_rows,
)
from benchmarks.report import load


def test_a_time_is_that_of_the_call():
    waits = []
    ((median, p10, p90),) = measure(
        [lambda: time.sleep(0.001)], 20, lambda: waits.append(1), batch=5
    )
    assert p90 >= median >= p10 >= 900
    assert len(waits) == 1 + 4


def test_a_group_takes_turns_batch_by_batch():
    order = []
    first, second = measure(
        [lambda: order.append("a"), lambda: order.append("b")],
        8,
        lambda: order.append("|"),
        batch=3,
    )
    assert len(first) == len(second) == 3
    assert "".join(order).lstrip("ab") == "|aaa|bbb|aaa|bbb|aa|bb|"


def test_a_failure_or_a_wrong_answer_is_a_row_with_its_reason_and_the_others_are_measured():
    x = torch.randn(3)

    def broken() -> object:
        raise RuntimeError("no such kernel")

    group = [
        ("broken", broken),
        ("wrong", lambda: (lambda: x + 1, x)),
        ("right", lambda: (lambda: Relu()(x), torch.relu(x))),
    ]
    first, second, third = measure_group(group, 5, lambda: None)
    assert "no such kernel" in first.reason
    assert "not close" in second.reason
    assert second.median_us is None
    assert (third.name, third.reason) == ("right", "")


def test_a_contender_that_fails_while_it_is_measured_is_a_row_too():
    x, calls = torch.randn(3), []

    def tires() -> torch.Tensor:
        calls.append(1)
        if len(calls) > 100:
            raise RuntimeError("tired")
        return x

    (row,) = measure_group([("tires", lambda: (tires, x))], 5, lambda: None)
    assert "tired" in row.reason


def test_a_caller_that_holds_results_holds_as_many_at_a_time():
    results = []

    def call() -> torch.Tensor:
        results.append(torch.zeros(2))
        return results[-1]

    call_and_hold, _ = _make_holding_call((call, torch.zeros(2)), 2)
    references = [weakref.ref(call_and_hold()) for _ in range(4)]
    results.clear()
    assert [reference() is not None for reference in references] == [False, False, True, True]


def test_conclusions_come_from_the_rows():
    rows = [
        OverheadRow("accelerated: launches, 1", 4.0),
        OverheadRow("accelerated: launches, 8", 11.0),
        OverheadRow("accelerated: three operators", 3.0, 2.0),
    ]
    assert summarise_rows(rows) == {"further_launch_us": 1.0}
    summary = summarise_rows([*rows, OverheadRow("eager: nn.Module, three operators", 6.0, 5.0)])
    assert (summary["three_operators_over_eager"], summary["three_operators_over_eager_p10"]) == (
        0.5,
        0.4,
    )


def test_the_executor_on_the_cpu_costs_no_more_than_eager_in_the_committed_results():
    document = load(
        Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "cpu-overhead.json"
    )
    assert document["environment"]["extension"] == "used"
    assert document["summary"] == summarise_rows([OverheadRow(**row) for row in document["rows"]])
    assert document["summary"]["three_operators_over_eager"] <= 1.0
    assert document["summary"]["three_operators_over_eager_p10"] <= 1.0


def test_it_runs_on_the_cpu_and_writes_its_results(tmp_path, capsys):
    out = tmp_path / "overhead.json"
    assert main(["--device", "cpu", "--calls", "30", "--only", "three", "--out", str(out)]) == 0
    saved = json.loads(out.read_text())
    assert saved["kind"] == "overhead"
    assert [row["name"] for row in saved["rows"]] == [
        "eager: nn.Module, three operators",
        "accelerated: three operators",
        "accelerated: three operators, Python executor",
    ]
    assert all(row["median_us"] > 0 for row in saved["rows"])
    assert str(tmp_path) not in out.read_text()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["summary"] == saved["summary"]
