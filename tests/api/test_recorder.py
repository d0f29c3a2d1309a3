"""What production calls is noted by form and counted, holds no data, survives damage, and can be
warmed up later.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_cudal1
from tests.entries import entry_for, plant
from torch_cudal1.__main__ import main
from torch_cudal1.api.backend import cudal1
from torch_cudal1.api.recording import recorder
from torch_cudal1.core import telemetry
from torch_cudal1.core.call_signature import FormError, describe, make_inputs
from torch_cudal1.core.errors import TargetError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.records import Candidate
from torch_cudal1.store.cache.files import Stored
from torch_cudal1.store.recording_file import (
    CallRecord,
    Mode,
    _check,
    _parse_line,
    append_calls,
    read_calls,
)

ROOT = Path(__file__).parents[2]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(5, 8), nn.Linear(8, 4)

    def forward(
        self, tokens: torch.Tensor, scale: torch.Tensor, style: str = "plain", times: float = 1
    ) -> torch.Tensor:
        return self.linear(self.table(tokens)) * scale * times


def make_net() -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return Net(), (torch.tensor([[0, 4, 1]]), torch.ones(1))


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    telemetry.reset()
    recorder._counters.clear()
    with torch.no_grad():
        yield
    assert not recorder.is_on()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "seen.jsonl"


def accelerate_recorded(
    module: nn.Module, tmp_path: Path, example: Any = None, **options: Any
) -> Any:
    return torch_cudal1.accelerate(
        module, example, cache_dir=tmp_path / "cache", strictness="error", **options
    )


def counts(file: Path) -> dict[str, int]:
    """Calls by the shapes of the tensors."""
    contents = read_calls(file)
    assert not contents.problems
    return {
        str([leaf[1] for leaf in _tensors(json.loads(record.form))]): record.calls
        for record in contents.seen
    }


def _tensors(form: Any) -> list[Any]:
    ((kind, body),) = form.items()
    if kind == "t":
        return [body]
    parts = body.values() if kind == "d" else body if kind in ("l", "u") else ()
    return [leaf for part in parts for leaf in _tensors(part)]


# --- what is counted


@pytest.mark.parametrize("quick", [True, False])
def test_every_call_is_counted_by_its_form_on_the_quick_way_too(tmp_path, file, monkeypatch, quick):
    if not quick:
        monkeypatch.setattr(
            "torch_cudal1.runtime.dispatch.make_dispatch_table", lambda *, cuda: None
        )
    module, x = nn.Linear(4, 4), torch.randn(2, 4)
    plant(module, x, tmp_path / "cache")
    accelerate_recorded(module, tmp_path, x)
    table = module._compiled_call_impl._table
    assert (table is not None) == quick or quick  # without the extension both are the slow way
    for _ in range(5):
        module(x)  # before the recording: not in it
    with torch_cudal1.record(file):
        for _ in range(7):
            module(x)
        for _ in range(3):
            module(torch.randn(6, 4))
    module(x)
    assert counts(file) == {"[[2, 4]]": 7, "[[6, 4]]": 3}
    if table is not None:
        assert table.served > 9  # so most of the seven came the quick way


def test_a_module_that_is_best_left_alone_is_watched_while_a_recording_runs(tmp_path, file):
    module = nn.Dropout(0.5)  # nothing is prepared for random numbers
    with torch_cudal1.record(file):
        accelerate_recorded(module, tmp_path, torch.ones(2))
        for _ in range(4):
            module(torch.ones(3))
    assert counts(file) == {"[[3]]": 4}


def test_start_and_stop_and_two_recordings_at_once(tmp_path, file):
    module, x = accelerate_recorded(nn.Linear(4, 4), tmp_path), torch.randn(2, 4)
    first, second = torch_cudal1.record(file), torch_cudal1.record(tmp_path / "other")
    first.start()
    module(x)
    second.start().start()
    module(x)
    first.stop()
    module(x)
    second.stop()
    second.stop()
    assert counts(file) == {"[[2, 4]]": 2}
    assert counts(tmp_path / "other") == {"[[2, 4]]": 2}


def test_modes_are_part_of_what_is_seen(tmp_path, file):
    module, x = accelerate_recorded(nn.Linear(4, 4), tmp_path), torch.randn(2, 4)
    with torch_cudal1.record(file):
        module.eval()(x)
        module.train()(x)
        with torch.enable_grad():
            module(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            module(x)
    modes = {record.mode for record in read_calls(file).seen}
    autocast = Mode(False, True, (("cpu", "bfloat16"),))
    assert modes == {Mode(False, False), Mode(False, True), Mode(True, True), autocast}


def test_graphs_of_the_backend_are_counted_and_named_by_arguments(tmp_path, file, monkeypatch):
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda gm, inputs, config_patches=None: gm.forward
    )
    torch._dynamo.reset()
    module, inputs = make_net()
    with torch_cudal1.record(file):
        compiled = torch.compile(
            module, backend=cudal1, options={"cache_dir": tmp_path, "strictness": "error"}
        )
        for _ in range(3):
            compiled(*inputs)
    (record_seen,) = read_calls(file).seen
    assert (record_seen.kind, record_seen.calls) == ("graph", 3)
    assert sorted(json.loads(record_seen.form)["d"]) == ["scale", "tokens"]
    torch._dynamo.reset()


def test_a_graph_with_dynamic_shapes_is_counted_by_the_shapes_that_come(
    tmp_path, file, instant_search, monkeypatch
):
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda gm, inputs, config_patches=None: gm.forward
    )
    torch._dynamo.reset()
    module, _ = make_net()
    with torch_cudal1.record(file):
        options = {"cache_dir": tmp_path, "strictness": "error"}
        compiled = torch.compile(module, backend=cudal1, dynamic=True, options=options)
        for length in (2, 3, 3, 5, 3):
            compiled(torch.zeros(4, length, dtype=torch.int64), torch.ones(1))
        compiled(
            torch.zeros(9, 9, dtype=torch.int64), torch.ones(1), times=0.5
        )  # a number of which Dynamo makes a tensor
    torch._dynamo.reset()
    calls_by_shape = counts(file)
    assert {
        "[[1], [4, 2]]": 1,
        "[[1], [4, 3]]": 3,
        "[[1], [4, 5]]": 1,
    }.items() <= calls_by_shape.items()
    assert len(calls_by_shape) == 4
    assert instant_search == []
    results = torch_cudal1.warmup(
        target(tmp_path), settings=Settings(cache_dir=tmp_path / "warm"), recording=file
    )
    assert {"1, 4x3, 3 calls)", "1, 4x2, 1 calls)", "1, 4x5, 1 calls)"} < {
        result.target.split("(")[1] for result in results
    }
    assert len(results) == 4
    assert all(result.error is None for result in results)


def test_no_value_and_no_text_is_written(tmp_path, file):
    module, _ = make_net()
    accelerate_recorded(module, tmp_path)
    secret = torch.tensor([[3, 3, 3, 2]])
    with torch_cudal1.record(file):
        module(secret, torch.full((1,), 1234.5), style="my password", times=2)
    text = file.read_text()
    assert "password" not in text
    assert "1234" not in text
    assert "3,3,3" not in text.replace(" ", "")
    assert '"v":2' in text  # a number among the arguments decides what is computed


# --- the file


def make_record(name: str = "Net", calls: int = 1) -> CallRecord:
    return CallRecord("module", name, "0" * 16, '{"u":[]}', Mode(False, False), calls)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the children write, and end
def test_lines_of_many_processes_are_all_there(file):
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            stored = [
                append_calls(file, [make_record("a" * 300), make_record("b")]) for _ in range(100)
            ]
            os._exit(0 if all(isinstance(record, Stored) for record in stored) else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0, 0]
    contents = read_calls(file)
    assert not contents.problems
    assert {record.name[0]: record.calls for record in contents.seen} == {"a": 400, "b": 400}


def test_what_is_damaged_or_foreign_is_named_and_the_rest_is_used(file):
    append_calls(file, [make_record("first", 2)])
    good = file.read_bytes().strip()
    with open(file, "ab") as stream:
        stream.write(good.replace(b'"calls":2', b'"calls":9') + b"\n")  # changed
        stream.write(b"hello\n[1, 2]\n{}\n\xff\xfe\n" + b"[" * 100_000 + b"\n")
        stream.write(good[: len(good) // 2])  # cut short by a kill, without a line's end
    append_calls(file, [make_record("last", 3)])
    contents = read_calls(file)
    assert {record.name: record.calls for record in contents.seen} == {"first": 2, "last": 3}
    assert [int(problem.split("line ")[1].split()[0]) for problem in contents.problems] == [
        3,
        4,
        5,
        6,
        7,
        8,
        9,
    ]
    assert "check sum" in contents.problems[0]


def _parse_body(body: Any) -> Any:
    return _parse_line(json.dumps({"body": body, "check": _check(body)}).encode())


def test_a_line_that_lies_about_its_types_is_refused(file):
    mode = {"grad": 1, "training": False, "autocast": {}}
    body: dict[str, Any] = {"kind": "module", "name": "x", "identity": "y", "form": {}, "calls": 1}
    body |= {"mode": mode | {"grad": True}}
    assert not isinstance(_parse_body(body), str)
    bodies = [
        body | {"mode": mode},
        body | {"kind": "other"},
        body | {"calls": -1},
        body | {"calls": True},
        body | {"name": 3},
    ]
    file.write_text(
        "\n".join(json.dumps({"body": content, "check": _check(content)}) for content in bodies)
    )
    assert len(read_calls(file).problems) == len(bodies)


def test_the_file_stays_below_its_limit_and_the_report_says_so(tmp_path, file, monkeypatch):
    assert isinstance(append_calls(file, [make_record()], limit_bytes=1000), Stored)
    assert isinstance(append_calls(file, [make_record("x" * 2000)], limit_bytes=1000), Refusal)
    assert file.stat().st_size < 1000
    module = accelerate_recorded(nn.Linear(4, 4), tmp_path)
    with torch_cudal1.record(tmp_path):  # a folder: nothing can be appended
        module(torch.randn(2, 4))
    assert torch_cudal1.report().counters["record.not_stored"] == 1


def test_memory_is_bounded(tmp_path, file, monkeypatch):
    monkeypatch.setattr(recorder, "MAX_FORMS", 3)
    module = accelerate_recorded(nn.Linear(4, 4), tmp_path)
    with torch_cudal1.record(file):
        for size in range(1, 6):
            module(torch.randn(size, 4))
            module(torch.randn(size, 4))
    assert len(counts(file)) == 3
    assert torch_cudal1.report().counters["forms_not_recorded"] >= 2


def test_counts_are_written_while_a_process_runs_and_again_only_when_they_doubled(
    tmp_path, file, monkeypatch
):
    monkeypatch.setattr(recorder, "WRITE_INTERVAL_S", 0.01)
    module, x = accelerate_recorded(nn.Linear(4, 4), tmp_path), torch.randn(2, 4)
    with torch_cudal1.record(file):
        for _ in range(8):
            module(x)
        deadline = time.monotonic() + 300
        # The file is there before its first line.
        while not (file.exists() and counts(file)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sum(counts(file).values()) >= 1  # before it ended
        for _ in range(200):
            module(x)
            time.sleep(0.0005)
    assert counts(file) == {"[[2, 4]]": 208}
    assert len(file.read_text().split()) < 12  # not one a period


def test_the_variable_records_a_process_to_its_end_and_a_fork_writes_only_its_own(tmp_path, file):
    code = f"""
import os, torch, torch_cudal1
from tests.entries import plant
torch.set_num_threads(1)
with torch.no_grad():
    net, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    plant(net, x, {str(tmp_path)!r})
    torch_cudal1.accelerate(net, x, cache_dir={str(tmp_path)!r})
    for _ in range(3): net(x)
    child = os.fork()
    if child == 0:
        for _ in range(5): net(x)
        from torch_cudal1.api.recording import recorder
        recorder._stop_all_recordings()
        os._exit(0)
    os.waitpid(child, 0)
"""
    environment = {**os.environ, "TORCH_CUDAL1_RECORD": str(file), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert counts(file) == {"[[2, 4]]": 8}


# --- forms


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(2, 3).t(),
        torch.zeros(4, 1).expand(4, 5),
        torch.ones(0, 3),
        torch.tensor(1.0).bfloat16(),
        (
            torch.ones(1),
            [2, None, {"a": True, "b": 0.1}],
            torch.float16,
            torch.Size([1, 2]),
            float("nan"),
        ),
    ],
    ids=["transposed", "expanded", "empty", "scalar", "nested"],
)
def test_what_is_made_has_the_form_that_was_described(value):
    form = json.loads(json.dumps(describe(value), allow_nan=False))
    assert describe(make_inputs(form, torch.device("cpu"))) == form


def test_made_indices_are_those_of_the_example_and_made_flags_too():
    form = describe(torch.zeros(40, dtype=torch.int64))
    tensor = make_inputs(form, torch.device("cpu"), torch.tensor([[3, 7]]))
    assert set(tensor.tolist()) == {3, 7}
    assert not make_inputs(form, torch.device("cpu")).any()
    assert not make_inputs(
        describe(torch.ones(9, dtype=torch.bool)), torch.device("cpu"), torch.tensor([False])
    ).any()


@pytest.mark.parametrize(
    "form",
    [
        None,
        {},
        {"t": []},
        {"t": ["float32", [2], [-1], "cpu", False]},
        {"t": ["float32", [1 << 50], [1], "cpu", False]},
        {"t": ["object", [1], [1], "cpu", False]},
        {"t": ["float32", [1], [1], "cuda", False]},
        {"x": 1},
        {"s": 0},
        {"u": 3},
        {"f": "xyz"},
    ],
    ids=str,
)
def test_a_form_that_nothing_can_be_made_of_is_refused(form):
    with pytest.raises(FormError):
        make_inputs(form, torch.device("cpu"))


# --- warm-up


@pytest.fixture
def instant_search(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A search that takes no time and accepts the region as it is; the names of what was searched
    for.
    """
    names: list[str] = []

    def tune(region: Any, place: Any, **rest: Any) -> Any:
        names.append(region.key)
        return entry_for(region, Candidate(region.program, "eager", "baseline"), place.settings)

    monkeypatch.setattr("torch_cudal1.search.tune.tune", tune)
    return names


def target(tmp_path: Path) -> str:
    (tmp_path / "served.py").write_text("from tests.api.test_recorder import make_net as make\n")
    return f"{tmp_path / 'served.py'}:make"


def test_every_recorded_form_is_warmed_and_then_known(tmp_path, file, instant_search):
    module, _ = make_net()
    accelerate_recorded(module, tmp_path)
    calls = [
        ((torch.tensor([[1, 2], [3, 4]]), torch.ones(1)), {}),
        ((torch.tensor([[1]]), torch.ones(1)), {"times": 3, "style": "x"}),
    ]
    with torch_cudal1.record(file):
        for args, kwargs in calls:
            module(*args, **kwargs)
    settings = Settings(cache_dir=tmp_path / "warm", strictness="error")
    with pytest.raises(TargetError, match="this_is_not_there"):
        torch_cudal1.warmup(
            target(tmp_path), settings=settings, recording=tmp_path / "this_is_not_there"
        )
    results = torch_cudal1.warmup(target(tmp_path), settings=settings, recording=file)
    assert [result.error for result in results[:1]] == [None]
    assert "texts are not recorded" in (
        results[1].error or ""
    )  # and the target has none of its own at that place
    assert instant_search == [region.key for region in capture_regions(module, *calls[0])]


def test_the_same_call_recorded_by_the_backend_is_warmed_for_it(
    tmp_path, file, instant_search, monkeypatch
):
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda gm, inputs, config_patches=None: gm.forward
    )
    module, _ = make_net()
    inputs = torch.zeros(7, 2, dtype=torch.int64), torch.ones(1)
    torch._dynamo.reset()
    with torch_cudal1.record(file):
        torch.compile(module, backend=cudal1, options={"cache_dir": tmp_path})(*inputs)
    torch._dynamo.reset()
    results = torch_cudal1.warmup(
        target(tmp_path), settings=Settings(cache_dir=tmp_path / "warm"), recording=file
    )
    assert [result.error for result in results] == [None]
    options = {"cache_dir": tmp_path / "warm", "on_miss": "error", "strictness": "error"}
    torch.compile(module, backend=cudal1, options=options)(*inputs)
    torch._dynamo.reset()


def test_a_recording_of_another_module_is_refused_with_what_it_holds(
    tmp_path, file, instant_search
):
    module = accelerate_recorded(nn.Linear(4, 4), tmp_path)
    with torch_cudal1.record(file):
        module(torch.randn(2, 4))
    with pytest.raises(TargetError, match="module Linear"):
        torch_cudal1.warmup(target(tmp_path), settings=Settings(cache_dir=tmp_path), recording=file)


def test_a_module_inside_the_target_is_found_too(tmp_path, file, instant_search):
    module, _ = make_net()
    accelerate_recorded(module.linear, tmp_path)
    with torch_cudal1.record(file):
        module.linear(torch.randn(6, 8))
    (result,) = torch_cudal1.warmup(
        target(tmp_path), settings=Settings(cache_dir=tmp_path / "warm"), recording=file
    )
    assert result.error is None
    assert ":linear (6x8, 1 calls)" in result.target


def test_the_command_takes_a_recording_and_names_lines_that_are_not_used(
    tmp_path, file, instant_search, capsys, caplog, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "300")
    module, _ = make_net()
    accelerate_recorded(module, tmp_path)
    with torch_cudal1.record(file):
        module(torch.tensor([[1, 2]]), torch.ones(1))
    with open(file, "a") as stream:
        stream.write("not a line of ours\n")
    where = ("--cache-dir", str(tmp_path / "warm"), "--device", "cpu", "--quiet")
    assert main(["warmup", target(tmp_path), "--recorded", str(file), *where]) == 0
    assert "1x2, 1, 1 calls" in capsys.readouterr().out
    assert "line 3 is not used" in caplog.text
