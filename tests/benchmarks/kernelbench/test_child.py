"""One task from its text to its row: tuned, measured, checked before and after, whatever a column
does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.kernelbench import baselines, child, contenders, measuring, verify
from benchmarks.kernelbench.child import Bench
from benchmarks.kernelbench.job import COMPILE, EAGER, OURS, PROFILES, RELEASE, Job
from benchmarks.kernelbench.loading import (
    Demand,
    TaskSource,
    estimate_demand,
    import_source,
    make_inputs,
    make_module,
)
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.peaks import DevicePeaks

DIAGONAL = """import torch
from torch import nn

class Model(nn.Module):
    def forward(self, a, b):
        return torch.diag(a) @ b

def get_inputs():
    return [torch.rand(512), torch.rand(512, 256)]

def get_init_inputs():
    return []
"""
JOB = Job("cpu", replace(PROFILES["quick"], tune_s=120.0, measure_s=0.05))
CPU = torch.device("cpu")


class RecordingChannel:
    """Keeps what was told, and grants everything."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.asked: list[int | None] = []

    def stage(self, name: str, column: str = "") -> None:
        self.stages.append(name)

    def memory(self, size_bytes: int | None, kept_bytes: int = 0) -> None:
        self.asked.append(size_bytes)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        self.stages.append("quiet")
        yield
        self.stages.append("loud")


def made(tmp_path: Path, source: str = DIAGONAL) -> TaskSource:
    path = tmp_path / "task.py"
    path.write_text(source)
    return import_source(path)


def bench(tmp_path: Path, source: str = DIAGONAL, job: Job = JOB, **spec: Any) -> Bench:
    return Bench(
        made(tmp_path, source),
        job,
        RecordingChannel(),
        {"cache": str(tmp_path / "cudal1"), "source": source, **spec},
    )  # type: ignore[arg-type]


def rowed(given: Bench) -> dict[str, Any]:
    with torch.no_grad():
        child._prepare(given, 1000)
        found = child._measure_task(given, Demand(1_000, 500, 0, 300))
    json.dumps(found, allow_nan=False)
    return found


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """No column needs a compiler: torch.compile is eager under another name."""
    monkeypatch.setattr(child, "STARTS", {**baselines.STARTS, COMPILE: lambda module, _: module})


def served(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def tuned(
        name: str, module: nn.Module, inputs: object, job: Job, cache: Path, say: Any
    ) -> contenders.TunedModule:
        say("judging", 0.5)
        return contenders.TunedModule(
            lambda *given: call(module, *given),
            {"tune_s": 1.0, "swapped": True, "techniques": ["t"]},
        )

    monkeypatch.setattr(contenders, "tune_module", tuned)


def test_a_search_wins_a_task_and_the_row_tells_all_of_it(tmp_path: Path, fast: None) -> None:
    # an arm is searched as the package's own column is, here without Inductor's long compilations
    arm = "without compile"
    given = bench(tmp_path, job=replace(JOB, ours=False, arms=(arm,)))
    row = rowed(given)
    facts, column = row["arms"][arm], row["columns"][arm]
    assert column["checked"]["by"] == ("float64" if facts["swapped"] else "eager")
    assert (column["checked"]["reason"], (column["checked"]["error_ratio"] or 0) <= 2) == ("", True)
    assert {name: one["status"] for name, one in row["columns"].items()} == {
        EAGER: "ok",
        COMPILE: "ok",
        arm: "ok",
    }
    assert facts["counters"]["regions_tuned"] == 1
    assert facts["tune_s"] > 0
    assert facts["tried"][0]["techniques"] == ["diag_matmul"]
    assert row["against"][arm]["best"].keys() == {"speedup", "low", "high", "steady"}
    assert row["columns"][EAGER]["us"] > 0
    assert row["columns"][EAGER]["host_us"] > 0
    line: Any = given.line
    assert line.asked == [3000, 30_000]
    measured = line.stages[line.stages.index("measure") :]
    assert measured[:3] == ["measure", "quiet", "loud"]


def test_a_wrong_answer_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: None
) -> None:
    served(lambda module, *given: module(*given) + 1e-3, monkeypatch)
    row = rowed(bench(tmp_path))
    column = row["columns"][OURS]
    assert (column["status"], "us" in column) == ("wrong", False)
    assert "the limit is" in column["reason"]
    assert OURS not in row["against"]


def test_an_answer_that_goes_wrong_while_it_is_timed_counts_as_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: None
) -> None:
    calls = []

    def tires(module: nn.Module, *given: Any) -> Any:
        calls.append(1)
        return module(*given) * (1.0 if len(calls) < 6 else 1.01)

    served(tires, monkeypatch)
    row = rowed(bench(tmp_path))
    assert row["columns"][OURS]["status"] == "wrong"
    assert OURS not in row["against"]


def test_a_column_that_raises_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: None
) -> None:
    def raises(module: nn.Module, *given: Any) -> Any:
        raise RuntimeError("no such kernel")

    served(raises, monkeypatch)
    row = rowed(bench(tmp_path))
    assert row["columns"][OURS]["reason"] == "RuntimeError: no such kernel"
    assert (row["best"] in (EAGER, COMPILE), row["columns"][EAGER]["status"]) == (True, "ok")


def test_a_baseline_that_computes_something_else_is_no_denominator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = {
        **baselines.STARTS,
        COMPILE: lambda module, _: lambda *given: torch.zeros_like(module(*given)),
    }
    monkeypatch.setattr(child, "STARTS", starts)
    served(lambda module, *given: module(*given), monkeypatch)
    row = rowed(bench(tmp_path))
    assert row["columns"][COMPILE]["status"] == "wrong"
    assert (row["best"], list(row["against"][OURS])) == (EAGER, [EAGER, "best"])


def test_a_task_that_draws_numbers_keeps_its_compiled_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reseeded(module: nn.Module, *given: Any) -> Any:
        torch.manual_seed(12345)  # as Inductor, which draws other numbers than eager
        return module(*given)

    starts = {
        **baselines.STARTS,
        COMPILE: lambda module, _: lambda *given: reseeded(module, *given),
    }
    monkeypatch.setattr(child, "STARTS", starts)
    served(lambda module, *given: module(*given), monkeypatch)
    row = rowed(
        bench(
            tmp_path,
            DIAGONAL.replace("torch.diag(a) @ b", "torch.rand(64, dtype=torch.float32) + a[:64]"),
        )
    )
    assert {name: column["status"] for name, column in row["columns"].items()} == {
        EAGER: "ok",
        COMPILE: "ok",
        OURS: "ok",
    }
    served(reseeded, monkeypatch)  # of the package's own column eager's very numbers are expected
    assert (
        rowed(bench(tmp_path, DIAGONAL.replace("torch.diag(a) @ b", "torch.rand(64) + a[:64]")))[
            "columns"
        ][OURS]["status"]
        == "wrong"
    )


def test_a_task_that_eager_cannot_run_has_no_times_and_says_why(tmp_path: Path, fast: None) -> None:
    row = rowed(bench(tmp_path, DIAGONAL.replace("torch.diag(a) @ b", "a @ a @ b")))
    assert {column["status"] for column in row["columns"].values()} == {"failed"}
    assert (row["best"], row["against"]) == (None, {})


def test_a_release_candidates_judged_ratio_is_carried_over_to_every_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: None
) -> None:
    paired = {"over": EAGER, "speedup": 2.0, "low": 1.9, "high": 2.1}
    monkeypatch.setattr(
        contenders,
        "judge_candidate",
        lambda *given: {"status": "ok", "reason": "", "paired": paired, "error_ratio": 1.0},
    )
    row = rowed(bench(tmp_path, job=replace(JOB, ours=False, judged="h100 0123"), candidate="code"))
    us, found = (
        {name: column["us"] for name, column in row["columns"].items()},
        row["against"][RELEASE],
    )
    assert us[RELEASE] == pytest.approx(us[EAGER] / 2)
    assert found[EAGER]["speedup"] == pytest.approx(2.0)
    assert found[COMPILE]["speedup"] == pytest.approx(2.0 * us[COMPILE] / us[EAGER])
    assert found["best"] == found[row["best"]]


@pytest.mark.parametrize(
    ("told", "candidate", "status"),
    [
        ({"status": "refused", "reason": "numerics: far off"}, "code", "refused"),
        ({}, None, "withdrawn"),
    ],
)
def test_a_release_candidate_that_is_refused_or_withdrawn_has_no_ratio(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fast: None,
    told: Mapping[str, Any],
    candidate: str | None,
    status: str,
) -> None:
    monkeypatch.setattr(contenders, "judge_candidate", lambda *given: dict(told))
    row = rowed(
        bench(tmp_path, job=replace(JOB, ours=False, judged="h100 0123"), candidate=candidate)
    )
    assert row["columns"][RELEASE]["status"] == status
    assert RELEASE not in row["against"]


def test_the_judge_itself_judges_a_candidate_and_its_refusal_is_told(tmp_path: Path) -> None:
    wrong = DIAGONAL.replace("class Model(", "class ModelNew(").replace("torch.diag(a) @ b", "b")
    found = contenders.judge_candidate(DIAGONAL, wrong, JOB, tmp_path)
    assert found["status"] == "refused"
    assert found["reason"]


# --- loading ---------------------------------------------------------------------------------------------------------------------


def test_weights_are_the_same_every_time_and_inputs_only_for_one_seed(tmp_path: Path) -> None:
    source = DIAGONAL.replace(
        "def forward(self, a, b):\n        return",
        "def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(4, 4)\n    def forward(self, a, b):\n        return",
    )
    task = made(tmp_path, source)
    first, second = (make_module(task, CPU, "eval") for _ in range(2))
    assert torch.equal(first.layer.weight, second.layer.weight)  # type: ignore[union-attr, arg-type]
    assert (first.training, make_module(task, CPU, "train").training) == (False, True)
    assert torch.equal(make_inputs(task, CPU, 1)[0], make_inputs(task, CPU, 1)[0])
    assert not torch.equal(make_inputs(task, CPU, 1)[0], make_inputs(task, CPU, 2)[0])


def test_demand_is_estimated_without_making_a_tensor(tmp_path: Path) -> None:
    large = estimate_demand(
        made(tmp_path, DIAGONAL.replace("512", "1_000_000")), "eval"
    )  # 1 GB of inputs, a diagonal matrix of 4 TB
    assert large is not None
    assert 4e12 < large.memory_bytes < 5e12
    small = estimate_demand(made(tmp_path), "eval")
    assert small is not None
    assert small.memory_bytes == 4 * (
        512 + 512 * 256 + 512 * 512 + 512 * 256
    )  # inputs, the diagonal matrix, the result
    assert small.least_bytes == 4 * (512 + 512 * 256 + 512 * 256)
    assert small.flops == 2 * 512 * 512 * 256
    assert (small.given_bytes, small.made_bytes) == (4 * (512 + 512 * 256), 4 * 512 * 256)


def test_who_measures_waits_until_the_gpu_answers_at_once() -> None:
    """Another process's kernels: an answer takes milliseconds, then no longer."""
    until = time.monotonic() + 0.3
    assert measuring.is_drained(lambda: time.sleep(0.003 if time.monotonic() < until else 2e-5))
    assert time.monotonic() > until
    assert not measuring.is_drained(lambda: time.sleep(0.003), limit_s=0.2)


def test_a_task_that_needs_values_has_no_estimate(tmp_path: Path) -> None:
    assert (
        estimate_demand(
            made(tmp_path, DIAGONAL.replace("torch.diag(a) @ b", "b if a.tolist() else a")), "eval"
        )
        is None
    )


def test_a_constructor_that_needs_values_has_one(tmp_path: Path) -> None:
    """As that of a Swin transformer, which reads its rates of stochastic depth from a tensor."""
    constructor = "    def __init__(self):\n        super().__init__()\n        self.rate = torch.linspace(0, 1, 3)[1].item()\n"
    found = estimate_demand(
        made(tmp_path, DIAGONAL.replace("    def forward", constructor + "    def forward")), "eval"
    )
    assert found is not None
    assert found == estimate_demand(made(tmp_path), "eval")


@pytest.mark.parametrize(
    ("needs", "floor"), [(Demand(0, 4_000_000, 0), 1.0), (Demand(0, 4_000_000, 3_000_000_000), 6.0)]
)
def test_the_floor_is_the_larger_of_bytes_and_products(
    monkeypatch: pytest.MonkeyPatch, needs: Demand, floor: float
) -> None:
    monkeypatch.setattr(
        measuring, "find_device_peaks", lambda device: DevicePeaks({4: 5e14}, 4e12, 0.0)
    )
    assert measuring.compute_lower_bound_us(needs, torch.device("cuda")) == pytest.approx(floor)
    assert measuring.compute_lower_bound_us(needs, CPU) is None
    refusal = Refusal("no peak rates known for it")
    monkeypatch.setattr(measuring, "find_device_peaks", lambda device: refusal)
    assert measuring.compute_lower_bound_us(needs, torch.device("cuda")) is None


def test_a_file_without_the_three_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="defines no get_inputs"):
        made(tmp_path, DIAGONAL.replace("get_inputs", "get_stuff"))


# --- measuring -------------------------------------------------------------------------------------------------------------------


def test_the_best_baseline_is_the_fastest_that_is_right() -> None:
    samples = {EAGER: [10.0] * 14, COMPILE: [5.0] * 14, OURS: [4.0] * 14}
    found = measuring.Measured(samples, {}, {})
    columns: dict[str, dict[str, Any]] = {
        name: {"status": "ok", "us": values[0]} for name, values in samples.items()
    }
    best, ratios = measuring.compute_ratios(found, JOB, columns, None)
    assert (best, ratios[OURS]["best"]["speedup"], ratios[OURS][EAGER]["speedup"]) == (
        COMPILE,
        1.25,
        2.5,
    )
    assert ratios[COMPILE]["best"]["speedup"] == 1.0
    columns[COMPILE]["status"] = "wrong"
    best, ratios = measuring.compute_ratios(found, JOB, columns, None)
    assert (best, ratios[OURS]["best"]["speedup"], COMPILE in ratios[OURS]) == (EAGER, 2.5, False)


def test_a_window_is_filled_and_otherwise_seven_rounds_are_enough() -> None:
    runs = {"a": lambda: None, "b": lambda: None}
    short = measuring._collect_samples(
        runs, CPU, replace(JOB, profile=replace(JOB.profile, measure_s=1e-6))
    )
    assert min(map(len, short.values())) >= 7
    window = replace(JOB, profile=replace(JOB.profile, measure_s=1.0, window=True))
    assert min(map(len, measuring._collect_samples(runs, CPU, window).values())) > 30


class Remembers(nn.Module):
    """Puts what it has computed into itself."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.zeros(4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)  # in place: a graph sees that
        self.hidden = torch.tanh(x + self.hidden)
        return self.hidden


def test_tensors_that_a_module_puts_into_itself_are_seen() -> None:
    module = nn.Sequential(Remembers(), nn.BatchNorm1d(4))
    before = baselines.list_state_tensors(module)
    module[0](torch.ones(4))
    after = baselines.list_state_tensors(module)
    assert [name for name in after if after[name] is not before[name]] == ["0.hidden"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_module_that_puts_tensors_into_itself_is_not_captured() -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="assigns hidden"):
        baselines.STARTS["CUDA graph"](Remembers().cuda(), (torch.ones(4, device="cuda"),))


def test_what_is_not_swapped_is_looked_at_as_a_baseline_is(tmp_path: Path) -> None:
    module = make_module(made(tmp_path), CPU, "eval")
    with torch.no_grad():
        wanted = verify.compute_expected(module, make_inputs(made(tmp_path), CPU, 1))
        coarse = lambda *inputs: module(*inputs) * 1.0005
        assert "error" in verify.check_column(coarse, wanted).reason
        assert verify.check_column(coarse, wanted, swapped=False).reason == ""
        assert (
            verify.check_column(lambda *inputs: module(*inputs) * 1.1, wanted, swapped=False).reason
            != ""
        )


class Remembering(torch.nn.Module):
    """As released recurrent tasks do: a state in a plain attribute, moved to the device by each
    call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.GRU(4, 4)
        self.h0 = torch.randn(1, 2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h0 = self.h0.to(x.device)
        return self.cell(x, self.h0)[0]


def test_a_task_with_a_tensor_of_its_own_is_compared_with_float64() -> None:
    module, inputs = Remembering().eval(), (torch.randn(3, 2, 4),)
    with torch.no_grad():
        wanted = verify.compute_expected(module, inputs)
        assert wanted.why == ""
        assert verify.check_column(module, wanted).by == "float64"
    assert module.h0.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_graph_hands_out_eagers_result_for_new_inputs(tmp_path: Path) -> None:
    device = torch.device("cuda")
    task = made(tmp_path)
    with torch.no_grad():
        module, inputs, others = (
            make_module(task, device, "eval"),
            make_inputs(task, device, 0),
            make_inputs(task, device, 1),
        )
        call = baselines.STARTS["CUDA graph"](module, inputs)
        assert (
            baselines.find_gross_error(
                baselines.copy_tensors(call(*others)), baselines.copy_tensors(module(*others))
            )
            == ""
        )
        assert (
            baselines.find_gross_error(
                baselines.copy_tensors(call(*inputs)), baselines.copy_tensors(module(*others))
            )
            != ""
        )
