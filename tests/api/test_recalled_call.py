"""A start on a warm cache captures nothing where the module is in the state of before, and answers
as the module itself does where it is not.
"""

from __future__ import annotations

import enum
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudal1
from tests.api.test_quick_tier import always_compile
from tests.api.test_recalled_capture import list_recalls
from tests.entries import plant
from torch_cudal1.api import binding
from torch_cudal1.api.signatures import recalled_call
from torch_cudal1.core import telemetry
from torch_cudal1.ir.program import Aten, Program, Value
from torch_cudal1.store.cache.local_cache import LocalCache

ROOT = Path(__file__).resolve().parents[2]
X = torch.randn(3, 4)


class Mode(enum.Enum):
    """A switch that no tensor shows."""

    RELU = 1
    TANH = 2


FLAG = 1.0
TABLE: dict[str, float] = {"scale": 1.0}


def scale(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x * factor


def leak(x: torch.Tensor, slope: float = 0.1) -> torch.Tensor:
    return F.leaky_relu(x, slope)


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Config:
    """An object behind an attribute."""

    def __init__(self) -> None:
        self.slope, self.mode, self.names = 0.5, Mode.RELU, {"a", "b"}


class Net(nn.Module):
    """Reads what a model reads: attributes, a config, globals, defaults, closures."""

    offset = 0.25

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.randn(4))
        self.config, self.settings = Config(), {"power": 1}
        self.activation = leak
        self.closure = make_closure(3.0)

    def extra(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> dict[str, Any]:
        hidden = self.activation(self.first(x)) + self.shift + self.offset
        hidden = torch.relu(hidden) if self.config.mode is Mode.RELU else torch.tanh(hidden)
        hidden = self.closure(scale(hidden) * FLAG * TABLE["scale"] * self.config.slope)
        for _ in range(self.settings["power"] + twice):
            hidden = self.extra(self.second(hidden))
        return {"hidden": hidden, "pair": (hidden.sum(-1), hidden), "name": "net"}


def make_closure(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    return multiply


@pytest.fixture(autouse=True)
def compile_without_gradients(dynamo: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    always_compile(monkeypatch)
    # In one process more and more modules are loaded, and pytest is no program of a user's.
    monkeypatch.setattr(recalled_call, "compute_program_digest", lambda: "one program")
    with torch.no_grad():
        yield


def start_process(module: nn.Module, folder: Path, on_miss: str = "quick") -> Any:
    """The module as a new process of the same program would bind it, which recalls calls."""
    torch._dynamo.reset()
    telemetry.reset()
    options = {"on_miss": on_miss, "cache_dir": folder, "strictness": "error", "recall": True}
    return cudal1.accelerate(module.eval(), **options)


def forbid_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("the call is captured")

    monkeypatch.setattr(binding, "capture_module_call", refuse)


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def check_calls(module: nn.Module) -> None:
    expected = module._call_impl(X)
    for _ in range(3):
        result = module(X)
        assert result["name"] == "net"
        torch.testing.assert_close(result["hidden"], expected["hidden"])
        torch.testing.assert_close(result["pair"][0], expected["pair"][0])
        # One tensor at two places is one tensor again.
        assert result["pair"][1] is result["hidden"]


def test_the_next_process_captures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_calls(start_process(make_net(), tmp_path))
    forbid_captures(monkeypatch)
    again = start_process(make_net(), tmp_path)
    check_calls(again)
    assert list_recalls() == [""]
    (region,) = cudal1.explain(again).regions
    assert (region.runs, region.name) == ("inductor", "Net.inference")
    # The weights are read live, as after a capture.
    with torch.no_grad():
        again.second.weight.mul_(2)
    check_calls(again)


def add_zero(program: Program) -> Program:
    """Another Program with the same outputs."""
    first, new = program.outputs[0], program.value_count
    assert first is not None
    step = Aten("aten.add.Scalar", (Value(first), 0), (), (new,))
    outputs = tuple(new if value == first else value for value in program.outputs)
    return replace(program, steps=(*program.steps, step), outputs=outputs)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_a_search_left_is_recalled_with_the_regions_own_program(
    is_damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(make_net(), (X,), tmp_path, change=add_zero)
    check_calls(start_process(make_net(), tmp_path))
    if is_damaged:
        changed = {"program": {"format": 0}}
        damage_records("program", changed, monkeypatch)
    else:
        forbid_captures(monkeypatch)
    again = start_process(make_net(), tmp_path, "baseline")
    check_calls(again)
    assert list_recalls() == ([] if is_damaged else [""])
    (region,) = cudal1.explain(again).regions
    assert region.techniques == ("planted",)


def set_attribute(owner: str, name: str, value: Any) -> Callable[[Net, pytest.MonkeyPatch], None]:
    def change(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
        target = functools.reduce(getattr, owner.split("."), net) if owner else net
        setattr(target, name, value)

    return change


def share_weights(net: Net, _: pytest.MonkeyPatch) -> None:
    net.second.weight = net.first.weight


def replace_method(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Net, "extra", lambda self, x: x + 1)


def replace_global(name: str, value: Any) -> Callable[[Net, pytest.MonkeyPatch], None]:
    return lambda _, monkeypatch: monkeypatch.setattr(sys.modules[__name__], name, value)


def change_default(_: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "__defaults__", (3.0,))


def change_code(_: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return x - factor

    monkeypatch.setattr(scale, "__code__", other.__code__)


def change_torch(_: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "relu", torch.sigmoid)


CHANGES: dict[str, Callable[[Net, pytest.MonkeyPatch], None]] = {
    "a number of a config": set_attribute("config", "slope", 0.75),
    "a member of an enumeration": set_attribute("config", "mode", Mode.TANH),
    "a dictionary": set_attribute("", "settings", {"power": 2}),
    "an attribute of the class": set_attribute("", "offset", 0.5),
    "a partial": set_attribute("", "activation", functools.partial(F.elu, alpha=0.3)),
    "a keyword of a partial": set_attribute(
        "", "activation", functools.partial(F.leaky_relu, negative_slope=0.9)
    ),
    "a closure": set_attribute("", "closure", make_closure(5.0)),
    "another function": set_attribute("", "closure", add_one),
    "another submodule": set_attribute(
        "", "second", nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    ),
    "a method of the class": replace_method,
    "a method of the object": set_attribute("", "extra", add_one),
    "shared weights": share_weights,
    "a global number": replace_global("FLAG", 3.0),
    "a global table": replace_global("TABLE", {"scale": 4.0}),
    "a global function": replace_global("scale", add_one),
    "a default argument": change_default,
    "the code of a function": change_code,
    "a function of torch": change_torch,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_another_state_gets_its_own_answer(
    change: Callable[[Net, pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_calls(start_process(make_net(), tmp_path))
    with monkeypatch.context() as patch:
        changed = make_net()
        change(changed, patch)
        check_calls(start_process(changed, tmp_path))
        assert "" not in list_recalls()
    # And back: what the other state left behind is not taken for this one's.
    check_calls(start_process(make_net(), tmp_path))


def test_a_change_after_the_start_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_calls(start_process(make_net(), tmp_path))
    with monkeypatch.context() as patch:
        forbid_captures(patch)
        again = start_process(make_net(), tmp_path)
        check_calls(again)
    for name in ("a number of a config", "a global number", "the code of a function"):
        with monkeypatch.context() as patch:
            CHANGES[name](again, patch)
            check_calls(again)
        check_calls(again)


def damage_records(kind: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the records with a field `kind` say something else."""
    find = LocalCache.get_decision_record

    def find_changed(self: LocalCache, *args: Any, **kwargs: Any) -> Any:
        record = find(self, *args, **kwargs)
        is_meant = isinstance(record, dict) and kind in record
        return {**record, **change} if is_meant else record

    monkeypatch.setattr(LocalCache, "get_decision_record", find_changed)


MODULE = ["LocalSource", {"local_name": "module"}]
FIRST_BIAS = [
    MODULE,
    ["AttrSource", {"member": "first"}],
    ["UnspecializedParamBufferSource", {"member": "bias"}],
]


@pytest.mark.parametrize(
    "change",
    [
        {"state": "0" * 64},
        {"state": None},
        {"outputs": [0, 1, 2]},
        {"outputs": [1, 0, 1]},
        {"outputs": []},
        {"outputs": [float("inf")]},
        {"outputs": "damaged"},
        {"inputs": []},
        {"inputs": [0, 0, 0, 0, 0, 0]},
        {"inputs": [FIRST_BIAS] * 6},
        {"inputs": [[["LocalSource", {"local_name": "args"}]]] * 6},
        {"guards": None},
        {"guards": [["ID_MATCH", [MODULE, ["AttrSource", {"member": "absent"}]], None]]},
        {"guards": [["CONSTANT_MATCH", [["GlobalSource", {"global_name": "import os"}]], None]]},
        {"guards": [["CONSTANT_MATCH", [["AttrSource", {"__class__": "int"}]], None]]},
        {"guards": [["CONSTANT_MATCH", [MODULE] * 1000, None]]},
        {"unchanged": [[[MODULE], "absent"]]},
        {"capture": {}},
        {"capture": {"region": "0", "order": [float("inf")], "origins": [], "static": []}},
        {"capture": None},
    ],
)
def test_a_damaged_record_changes_no_answer(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_calls(start_process(make_net(), tmp_path))
    damage_records("state", change, monkeypatch)
    check_calls(start_process(make_net(), tmp_path))


class Writer(Net):
    """Counts its calls."""

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> dict[str, Any]:
        self.shift.add_(0)
        return super().forward(x)


class Keeper(Net):
    """Returns a tensor of its own."""

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> dict[str, Any]:
        return {**super().forward(x), "shift": self.shift}


class Sampler(Net):
    """Draws random numbers."""

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> dict[str, Any]:
        return {**super().forward(x), "noise": torch.rand_like(x)}


@pytest.mark.parametrize("kind", [Writer, Keeper, Sampler])
def test_a_call_that_does_more_is_captured_in_every_process(
    kind: type[Net], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[nn.Module] = []
    capture = binding.capture_module_call

    def note(module: nn.Module, *arguments: Any) -> Any:
        captured.append(module)
        return capture(module, *arguments)

    monkeypatch.setattr(binding, "capture_module_call", note)
    for _ in range(2):
        check_calls(start_process(kind().eval(), tmp_path))
    assert len(captured) == 2


def test_another_signature_has_another_record(tmp_path: Path) -> None:
    for twice in (False, True):
        module = start_process(make_net(), tmp_path)
        for _ in range(3):
            torch.testing.assert_close(
                module(X, twice=twice)["hidden"], module._call_impl(X, twice=twice)["hidden"]
            )


class Asker(Net):
    """Asks its argument for an attribute, as helpers for several frameworks do."""

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> dict[str, Any]:
        result = super().forward(x)
        return {**result, "hidden": -result["hidden"]} if hasattr(x, "negative") else result


def test_an_attribute_of_an_argument_is_asked_for_at_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, tagged = torch.randn(3, 4), torch.randn(3, 4)
    tagged.negative = True  # type: ignore[attr-defined]
    for first, then in ((plain, tagged), (plain, tagged), (tagged, plain)):
        module = start_process(Asker().eval(), tmp_path)
        for x in (first, then, first):
            torch.testing.assert_close(module(x)["hidden"], module._call_impl(x)["hidden"])
    assert list_recalls() == [""]


SCRIPT = """
import os, sys, torch
import helper
from torch_cudal1.api import binding, quick_tier
from torch_cudal1.core import telemetry
import cudal1

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
    def forward(self, x):
        return self.linear(x).clamp(max=helper.Limit.HIGH.value * float(os.getenv("FACTOR", "1")))

quick_tier.MIN_SPEEDUP_BEYOND_NOISE = 0.0
torch.manual_seed(0)
with torch.no_grad():
    net = Net().eval()
    call = cudal1.accelerate(net, on_miss="quick", cache_dir=sys.argv[1], strictness="error", recall=True)
    # Only the second call's values reach the limit, which the first call's comparison cannot see.
    for x in (torch.ones(3, 4), 100 * torch.ones(3, 4)):
        torch.testing.assert_close(call(x), net._call_impl(x))
print([event.facts["wrong"] for event in telemetry.report().events if event.what == "recalled"])
"""
HELPER = """
import enum

class Limit(enum.Enum):
    HIGH = {value}
"""


def test_the_same_program_is_recalled_and_an_edited_one_is_captured(tmp_path: Path) -> None:
    script, helper = tmp_path / "script.py", tmp_path / "helper.py"
    script.write_text(SCRIPT)
    recalls = []
    # Other hash seeds: sets and addresses differ from process to process.
    for seed, value, factor in (
        ("1", 4.0, "1"),
        ("2", 4.0, "1"),
        ("3", 3.0, "1"),
        ("4", 3.0, "2"),
        ("5", 3.0, "2"),
    ):
        helper.write_text(HELPER.format(value=value))
        finished = subprocess.run(
            [sys.executable, "script.py", str(tmp_path / "cache")],
            env={**os.environ, "PYTHONHASHSEED": seed, "FACTOR": factor, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr[-2000:]
        recalls.append(finished.stdout.strip().splitlines()[-1])
    # The file of an enumeration was edited, then a variable of the environment set.
    assert recalls[1] == recalls[4] == "['']"
    assert recalls[0] == "[]"
