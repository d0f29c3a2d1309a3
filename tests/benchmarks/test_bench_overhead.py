"""The overhead benchmark measures what it names, keeps failures as rows, and draws its conclusions from its rows alone."""

from __future__ import annotations

import json
import time

import pytest
import torch

from benchmarks import bound
from benchmarks.bench_overhead import Relu, Row, Three, conclusions, main, measure, measured
from torch_cudal1 import native


@pytest.mark.skipif(native.extension() is None, reason="the quick way needs the C++ extension")
@pytest.mark.parametrize("schedule", ["eager", "python"])
def test_a_bound_module_answers_through_the_quick_way(schedule):
    module, x = Three(8), torch.randn(3, 8)
    with torch.inference_mode():
        plain = module(x)
        bound.whole(module, (x,), schedule)
        for _ in range(3):
            assert torch.equal(module(x), plain)
        assert module._compiled_call_impl._table.served == 2  # the first call fills the table
        module.w = torch.nn.Parameter(torch.zeros(8, 8))  # and what is bound no longer holds
        assert not torch.equal(module(x), plain)


def test_a_time_is_that_of_the_call():
    waits = []
    median, p10, p90 = measure(lambda: time.sleep(0.001), 20, lambda: waits.append(1), batch=5)
    assert p90 >= median >= p10 >= 900
    assert len(waits) == 1 + 4


def test_a_failure_or_a_wrong_answer_is_a_row_with_its_reason():
    x = torch.randn(3)

    def broken() -> object:
        raise RuntimeError("no such kernel")

    assert "no such kernel" in measured("broken", broken, 5, lambda: None).reason
    wrong = measured("wrong", lambda: (lambda: x + 1, x), 5, lambda: None)
    assert "not close" in wrong.reason
    assert wrong.median_us is None
    assert measured("right", lambda: (lambda: Relu()(x), torch.relu(x)), 5, lambda: None).reason == ""


def test_conclusions_come_from_the_rows():
    rows = [Row("accelerated: launches, 1", 4.0), Row("accelerated: launches, 8", 11.0), Row("accelerated: three operators", 3.0)]
    assert conclusions(rows) == {"further_launch_us": 1.0}
    assert conclusions([*rows, Row("eager: nn.Module, three operators", 6.0)])["three_operators_over_eager"] == 0.5


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
