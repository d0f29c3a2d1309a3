"""Shadow checks: a kernel that goes wrong in production is found, its result is not used, and it
runs nowhere again.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import torch_cudal1
from tests.entries import entry_for, plant, plant_compiled, same
from torch_cudal1.__main__ import main
from torch_cudal1.api.backend import cudal1
from torch_cudal1.api.shadow import (
    _CheckedCallable,
    _choose_tolerance,
    _find_difference,
    _Tolerance,
)
from torch_cudal1.core import native, telemetry
from torch_cudal1.core.errors import CacheMissError, SettingError
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph import swap as swapping
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.program import Aten, Program, Value
from torch_cudal1.ir.records import Candidate
from torch_cudal1.search.tune import choose
from torch_cudal1.store.cache.quarantine import (
    QuarantineRecord,
    find_quarantine_reason,
    list_quarantined,
    quarantine_candidate,
)
from torch_cudal1.store.context import make_context

pytestmark = pytest.mark.usefixtures("inference")

ROOT = Path(__file__).parents[2]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def there_and_back(program: Program, there: str, back: str, by: float, undone_by: float) -> Program:
    """The first result through two more steps, so that the Program is not the region's own."""
    first, new = program.outputs[0], program.value_count
    steps = (
        Aten(f"aten.{there}.Scalar", (Value(first), by), (), (new,)),
        Aten(f"aten.{back}.Scalar", (Value(new), undone_by), (), (new + 1,)),
    )
    return replace(program, steps=(*program.steps, *steps), outputs=(new + 1, *program.outputs[1:]))


def double_and_halve(program: Program) -> Program:
    """The same results by another Program."""
    return there_and_back(program, "mul", "mul", 2.0, 0.5)


def through_a_thousand(program: Program) -> Program:
    """Results rounded as sums of a thousand are."""
    return there_and_back(program, "add", "sub", 1000.0, 1000.0)


class Worn:
    """Makes every callable built for a candidate wrong after `good` calls of it: 1 % too large from
    then on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, good: int) -> None:
        self.calls, self.good, build = 0, good, swapping.build_runner

        def worn(*args: Any, **kwargs: Any) -> Any:
            runner = build(*args, **kwargs)

            def run(inputs: Any) -> Any:
                self.calls += 1
                first, *more = runner(inputs)
                return [first if self.calls <= self.good else first * 1.01, *more]

            return run

        monkeypatch.setattr(swapping, "build_runner", worn)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 8)


@pytest.fixture
def net(tmp_path: Path, x: torch.Tensor) -> Net:
    """A module for which a right kernel is stored."""
    module = Net()
    plant(module, x, tmp_path, change=double_and_halve)
    return module


def accelerate_watched(module: nn.Module, x: Any, tmp_path: Path, **options: Any) -> Any:
    settings = {"cache_dir": tmp_path, "strictness": "error", "shadow_rate": 1.0, **options}
    return torch_cudal1.accelerate(module, x, **settings)


def events(name: str) -> list[telemetry.Event]:
    return [
        event
        for event in torch_cudal1.report().events
        if event.stage == "shadow" and event.what == name
    ]


# --- what is wrong is found


@pytest.mark.parametrize("terms", [1000.0, 1.0])
def test_what_is_left_of_sums_that_cancel_is_measured_by_their_terms(tmp_path, terms) -> None:
    """A rounding of sums of 1000 is no mismatch however little of them is left; of sums of 1 it is."""
    layer = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        layer.weight[:, 4:] = -layer.weight[:, :4]
    half = terms * (1 + torch.rand(3, 4))
    x = torch.cat([half, half * (1 + 1e-3 / terms)], 1)
    plant(layer, x, tmp_path, change=through_a_thousand)
    accelerate_watched(layer, x, tmp_path)
    expected = layer._call_impl(x)
    output = layer(x)
    assert torch_cudal1.report().counters["shadow_checks"] == 1
    mismatch = terms == 1.0
    assert torch.equal(output, expected) == mismatch  # then the baseline's result is returned
    assert len(events("mismatch")) == mismatch


@pytest.mark.parametrize("fast", [True, False])
def test_a_kernel_that_goes_wrong_is_caught_and_the_call_returns_the_baseline_s_result(
    net, x, tmp_path, monkeypatch, caplog, fast
):
    if not fast:
        monkeypatch.setattr(
            "torch_cudal1.runtime.dispatch.make_dispatch_table", lambda *, cuda: None
        )
    elif not native.status()[0]:
        pytest.skip("the quick way needs the C++ extension")
    worn = Worn(monkeypatch, good=3)
    accelerate_watched(net, x, tmp_path)
    expected = net._call_impl(x)
    with caplog.at_level(logging.ERROR, "torch_cudal1"):
        assert all(torch.equal(net(x), expected) for _ in range(8))
    assert worn.calls == 4  # the fourth was wrong, its result was not used, and there was no fifth
    (event,) = events("mismatch")
    assert "rms" in event.facts["reason"]
    assert "quarantined" in caplog.text
    assert "quarantine" in str(torch_cudal1.explain(net).regions[0].reason)


def test_without_shadow_checks_the_same_fault_is_not_seen(net, x, tmp_path, monkeypatch):
    Worn(monkeypatch, good=3)
    accelerate_watched(net, x, tmp_path, shadow_rate=0.0)
    expected = net._call_impl(x)
    assert not all(torch.equal(net(x), expected) for _ in range(8))


def test_every_module_that_runs_the_kernel_stops_even_an_unwatched_one(
    net, x, tmp_path, monkeypatch
):
    worn = Worn(monkeypatch, good=4)
    other = Net()
    accelerate_watched(other, x, tmp_path, shadow_rate=0.0)
    assert torch.equal(other(x), other._call_impl(x))
    assert torch.equal(other(x), other._call_impl(x))
    accelerate_watched(net, x, tmp_path)
    net(x), net(x), net(x)
    assert worn.calls == 5
    assert torch.equal(other(x), other._call_impl(x))
    assert worn.calls == 5


def test_the_backend_s_graphs_are_checked_too(x, tmp_path, monkeypatch):
    module = Net()
    assert plant_compiled(lambda call: call(x), module, tmp_path, double_and_halve) == 1
    Worn(monkeypatch, good=2)
    options = {"cache_dir": tmp_path, "strictness": "error", "shadow_rate": 1.0}
    compiled = torch.compile(module, backend=cudal1, options=options)
    assert all(torch.equal(compiled(x), module(x)) for _ in range(5))
    assert len(events("mismatch")) == 1
    torch._dynamo.reset()


def test_a_training_forward_is_checked_and_its_backward_is_left_out_with_a_reason(
    x, tmp_path, monkeypatch
):
    module = Net()
    with torch.enable_grad():
        plant(module, x, tmp_path, change=double_and_halve)
        Worn(monkeypatch, good=0)
        accelerate_watched(module, x, tmp_path)
        got = module(x)
        assert torch.equal(got, module._call_impl(x))
        got.sum().backward()
    assert len(events("mismatch")) == 1
    assert "training backward" in events("left_out")[0].facts["reason"]


# --- and stays found


def test_a_quarantine_holds_in_a_new_process_and_under_every_on_miss(net, x, tmp_path, monkeypatch):
    Worn(monkeypatch, good=0)
    accelerate_watched(net, x, tmp_path)
    net(x)
    code = f"""
import torch, torch_cudal1
from tests.api.test_shadow import Net
torch.manual_seed(0)
net, x = Net(), torch.randn(3, 8)
with torch.no_grad():
    torch_cudal1.accelerate(net, x, cache_dir={str(tmp_path)!r}, on_miss="error", strictness="error")
    print(net(x).shape, torch_cudal1.report().counters["resolve.quarantined"], torch_cudal1.explain(net).regions[0].reason)
"""
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=dict(os.environ),
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert "1 quarantined: a shadow check found it wrong" in process.stdout


def test_a_search_does_not_take_the_same_candidate_again(net, x, tmp_path, monkeypatch):
    (region,) = capture_regions(net, (x,))
    place = make_context(
        torch.device("cpu"), Settings(cache_dir=tmp_path, on_miss="tune", budget_s=0.5)
    )
    candidate = Candidate(double_and_halve(region.program), "eager", "rewrites", ("planted",))
    judged: list[str] = []
    monkeypatch.setattr(
        "torch_cudal1.judge.evaluate_candidate",
        lambda region, candidate, *rest: judged.append(candidate.digest),
    )
    ranking = type(
        "Ranking",
        (),
        {"best": Candidate(region.program, "eager", "baseline"), "medians_us": {}, "failures": {}},
    )()
    monkeypatch.setattr("torch_cudal1.judge.rank_baselines", lambda *rest: ranking)
    quarantine_candidate(tmp_path, QuarantineRecord(region.key, candidate.digest, "it was wrong"))
    choice = choose(region, place)
    assert not choice.swapped
    assert judged == []
    assert choice.entry is not None
    assert "it was wrong" in choice.entry.tried[0]["reason"]


def test_another_candidate_of_the_region_may_run_and_another_region_s_same_one_too(
    net, x, tmp_path
):
    (region,) = capture_regions(net, (x,))
    place = make_context(torch.device("cpu"), Settings(cache_dir=tmp_path))
    candidate = choose(region, place).candidate
    quarantine_candidate(tmp_path, QuarantineRecord(region.key, candidate.digest, "it was wrong"))
    assert not choose(region, place).swapped
    place.cache.put(
        entry_for(
            region, Candidate(same(region.program), "eager", "rewrites", ("other",)), place.settings
        )
    )
    assert choose(region, place).swapped
    assert find_quarantine_reason([tmp_path], "0" * 64, candidate.digest) is None


@pytest.mark.parametrize("damage", [b"", b"{", b'{"region_key": "x"}', b"[1, 2]", b"\xff\xff"])
def test_a_damaged_record_still_holds_its_candidate_back(net, x, tmp_path, damage):
    (region,) = capture_regions(net, (x,))
    place = make_context(torch.device("cpu"), Settings(cache_dir=tmp_path))
    stored = quarantine_candidate(
        tmp_path, QuarantineRecord(region.key, choose(region, place).candidate.digest, "wrong")
    )
    stored.path.write_bytes(damage)
    choice = choose(region, place)
    assert not choice.swapped
    assert "unreadable" in choice.reason


def test_records_of_read_only_folders_hold_too(net, x, tmp_path):
    (region,) = capture_regions(net, (x,))
    settings = Settings(cache_dir=tmp_path, read_only_caches=(tmp_path / "shared",))
    candidate = choose(region, make_context(torch.device("cpu"), settings)).candidate
    quarantine_candidate(
        tmp_path / "shared", QuarantineRecord(region.key, candidate.digest, "wrong elsewhere")
    )
    assert "wrong elsewhere" in choose(region, make_context(torch.device("cpu"), settings)).reason


def test_a_folder_that_cannot_be_written_costs_the_record_and_not_the_quarantine(
    net, x, tmp_path, monkeypatch, caplog
):
    before = set(swapping._in_use)
    accelerate_watched(net, x, tmp_path)
    (swapped,) = set(swapping._in_use) - before
    runner = swapped._runner
    assert isinstance(runner, _CheckedCallable)
    (tmp_path / "v1" / "quarantine").write_text("a file where the folder should be")
    monkeypatch.setattr(
        runner, "_runner", lambda inputs: [out * 2 for out in runner._swapped.reference(inputs)]
    )
    expected = net._call_impl(x)
    assert all(torch.equal(net(x), expected) for _ in range(3))
    assert "not_stored" in events("mismatch")[0].facts
    assert "not written down" in caplog.text


def test_list_and_show_say_it_and_purge_lifts_it(net, x, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    Worn(monkeypatch, good=0)
    accelerate_watched(net, x, tmp_path)
    net(x)
    (record,) = list_quarantined([tmp_path])
    folder = ("--cache-dir", str(tmp_path))
    assert main(["list", *folder]) == 0
    assert "quarantined" in capsys.readouterr().out
    assert main(["show", record.region_key, *folder]) == 0
    assert "a shadow check found it wrong" in capsys.readouterr().out
    assert main(["purge", "--quarantined", *folder]) == 0
    assert "would be" in capsys.readouterr().out
    assert list_quarantined([tmp_path])
    assert main(["purge", "--quarantined", "--yes", *folder]) == 0
    assert not list_quarantined([tmp_path])
    assert main(["list", *folder]) == 0
    shown = capsys.readouterr().out
    assert "1 entry" in shown  # the entry itself stayed
    assert "quarantined" not in shown


def test_purging_an_entry_takes_its_record_along(net, x, tmp_path):
    (region,) = capture_regions(net, (x,))
    quarantine_candidate(tmp_path, QuarantineRecord(region.key, "a" * 64, "wrong"))
    quarantine_candidate(tmp_path, QuarantineRecord("b" * 64, "c" * 64, "wrong"))
    assert main(["purge", region.key[:16], "--yes", "--cache-dir", str(tmp_path)]) == 0
    assert [record.region_key for record in list_quarantined([tmp_path])] == ["b" * 64]


# --- whom it is told


def test_the_user_s_function_gets_the_event_and_may_raise(net, x, tmp_path, monkeypatch):
    Worn(monkeypatch, good=1)
    events_seen: list[telemetry.Event] = []

    def alert(event: telemetry.Event) -> None:
        events_seen.append(event)
        raise RuntimeError("the pager is broken")

    accelerate_watched(net, x, tmp_path, on_mismatch=alert)
    expected = net._call_impl(x)
    assert all(torch.equal(net(x), expected) for _ in range(3))
    assert [(event.stage, event.what) for event in events_seen] == [("shadow", "mismatch")]
    assert "the pager is broken" in events("callback_failed")[0].facts["reason"]


def test_the_function_may_be_named_and_a_name_that_is_not_there_is_refused(
    net, x, tmp_path, monkeypatch
):
    with pytest.raises(SettingError, match="no_such_module"):
        accelerate_watched(net, x, tmp_path, on_mismatch="no_such_module:alert")
    with pytest.raises(SettingError, match="it names a"):
        accelerate_watched(net, x, tmp_path, on_mismatch="math:pi")
    Worn(monkeypatch, good=0)
    accelerate_watched(net, x, tmp_path, on_mismatch="builtins:print")
    net(x)
    assert events("mismatch")


# --- what is not checked, and what it costs


def test_at_rate_zero_nothing_is_put_in_the_way(net, x, tmp_path):
    before = set(swapping._in_use)
    accelerate_watched(net, x, tmp_path, shadow_rate=0.0)
    (swapped,) = set(swapping._in_use) - before
    assert not isinstance(swapped._runner, _CheckedCallable)
    net(x)
    assert "shadow_checks" not in torch_cudal1.report().counters


def test_about_the_asked_share_of_calls_is_checked_without_touching_the_user_s_random_numbers(
    net, x, tmp_path
):
    accelerate_watched(net, x, tmp_path, shadow_rate=0.1)
    state = torch.get_rng_state()
    for _ in range(3000):
        net(x)
    assert 200 < torch_cudal1.report().counters["shadow_checks"] < 420  # 300 +- 16
    assert torch.equal(torch.get_rng_state(), state)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x * self.calls


@pytest.mark.parametrize(
    ("module", "reason"), [(Writes(), "writes to its inputs"), (nn.Dropout(0.5), "random")]
)
def test_what_a_second_run_would_not_repeat_is_left_out_with_a_reason(module, reason, x, tmp_path):
    plant(module, x, tmp_path)
    accelerate_watched(module, x, tmp_path)
    module(x)
    assert reason in events("left_out")[0].facts["reason"]
    assert "shadow_checks" not in torch_cudal1.report().counters


class OnGpu:
    is_cuda = True


def test_inside_a_capture_the_kernel_runs_unchecked_and_the_next_call_is_sampled(monkeypatch):
    capturing, ran = [True], []
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: capturing[0])
    swapped = SimpleNamespace(
        quarantined="", reference=lambda inputs: ran.append("baseline") or [torch.ones(2)]
    )
    stream = SimpleNamespace(
        key="", report_mismatch=ran.append, measure_input_sensitivity=lambda inputs, position: None
    )
    kernel = lambda inputs: ran.append("kernel") or [torch.ones(2)]
    shadowed = _CheckedCallable(swapped, kernel, 1e-9, _Tolerance("match", 1, 0.0, True), stream)
    shadowed._calls_left = 1
    shadowed([OnGpu()]), shadowed([OnGpu()])
    assert ran == ["kernel", "kernel"]
    capturing[0] = False
    shadowed([OnGpu()])
    assert ran == ["kernel", "kernel", "baseline", "kernel"]
    shadowed([OnGpu()])
    assert ran[4:] == ["kernel"]


@pytest.mark.parametrize(
    ("wrong", "mismatches"), [(1, ""), (4, ""), (5, "elements differ"), (40, "elements differ")]
)
def test_indices_chosen_among_rounded_numbers_may_tie_and_not_be_wrong(wrong, mismatches):
    eager = torch.arange(40)
    kernel_output = eager.clone()
    kernel_output[:wrong] += 1
    assert mismatches in str(
        _find_difference([kernel_output], [eager], _Tolerance("match", 1, 0.0, True))
    )
    assert _find_difference(
        [kernel_output], [eager], _Tolerance("match", 1, 0.0, False)
    )  # of integers alone, each must be the same
    assert bool(
        _find_difference([kernel_output], [eager], _Tolerance("match", 1, 0.0, True))
    ) == bool(mismatches)


def test_a_baseline_that_cannot_run_now_does_not_cost_the_call(net, x, tmp_path, monkeypatch):
    def too_large(self: object, inputs: object) -> None:
        raise torch.OutOfMemoryError("no room for a second run")

    accelerate_watched(net, x, tmp_path)
    monkeypatch.setattr(swapping.Swapped, "reference", too_large)
    assert torch.allclose(net(x), net._call_impl(x))
    assert "no room" in events("not_checked")[0].facts["reason"]


# --- what counts as different


class Mixed(nn.Module):
    """Rounds to bfloat16 inside, gives float32: right evaluations lie far further apart than
    float32's digits say.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.bfloat16()
        for layer in self.layers:
            x = torch.nn.functional.linear(x, layer.weight.bfloat16(), layer.bias.bfloat16()).relu()
        return x.float()


def test_formats_inside_the_region_widen_the_tolerance_and_still_catch_a_wrong_result(tmp_path):
    module, x = Mixed(), torch.randn(32, 64)
    (region,) = capture_regions(module, (x,))
    place = make_context(torch.device("cpu"), Settings(cache_dir=tmp_path))
    plant(module, x, tmp_path, change=double_and_halve)
    tolerance = _choose_tolerance(choose(region, place), place)
    expected = module(x)
    in_float32 = x
    for layer in module.layers:
        in_float32 = layer(in_float32).relu()
    assert _find_difference(
        [in_float32], [expected], replace(tolerance, drift=0.0)
    )  # so the drift is what admits it
    assert _find_difference([in_float32], [expected], tolerance) is None
    assert "rms" in str(_find_difference([expected * 1.5], [expected], tolerance))
    assert "missing" in str(_find_difference([None], [expected], tolerance))
    assert "expected" in str(_find_difference([expected[:1]], [expected], tolerance))
    assert "NaN" in str(_find_difference([expected * torch.nan], [expected], tolerance))


def test_on_miss_error_still_raises_for_what_is_not_known(x, tmp_path):
    with pytest.raises(CacheMissError):
        accelerate_watched(Net(), x, tmp_path, on_miss="error")
