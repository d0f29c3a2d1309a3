"""Updates of parameters are seen however they are written, however small, and in whichever tensor."""

from __future__ import annotations

import pytest

from tests.judge.checks.module_sources import WEIGHT, ModuleBench, ModuleCase
from torch_cudal1.judge.checks.module_semantics.updates import UPDATE_PATH, _draw_ways
from torch_cudal1.judge.profiles import PROFILES, UPDATE_WAYS

KEPT = """
p = self.linear.weight
if self.kept is None or not torch.allclose(self.kept, p{tolerance}): self.kept = p.detach().clone()
self.w = self.kept
"""
BIAS = WEIGHT.replace("self.w, self.linear.bias", "self.linear.weight, self.b")
MODULES: dict[str, ModuleCase] = {
    "a weight captured at construction": (
        {
            "init": "self.held = [self.linear.weight]",
            "before": "self.w = self.held[0]",
            "result": WEIGHT,
        },
        "fast",
        (UPDATE_PATH,),
        "update_path",
    ),
    "a weight kept while the latest is near": (
        {"init": "self.kept = None", "before": KEPT.format(tolerance=""), "result": WEIGHT},
        "fast",
        (UPDATE_PATH,),
        "update_path",
    ),
    "a weight kept while the latest is not far": (
        {
            "init": "self.kept = None",
            "before": KEPT.format(tolerance=", 0.2, 0.2"),
            "result": WEIGHT,
        },
        "fast",
        (UPDATE_PATH,),
        "update_path",
    ),
    "a weight kept while the latest is the same": (
        {
            "init": "self.kept = None",
            "before": KEPT.format(tolerance=", 0.0, 0.0"),
            "result": WEIGHT,
        },
        "fast",
        (UPDATE_PATH,),
        None,
    ),
    "a bias kept while all other tensors are the same": (
        {
            "init": "self.kept = None",
            "before": "state = [p for n, p in self.state_dict().items() if n != 'linear.bias']\n"
            "if self.kept is None or not all(map(torch.equal, self.kept[0], state)):\n"
            "    self.kept = [p.clone() for p in state], self.linear.bias.detach().clone()\n"
            "self.b = self.kept[1]",
            "result": BIAS,
        },
        "fast",
        (UPDATE_PATH,),
        "update_path",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_what_is_kept_of_parameters_follows_them(module_bench: ModuleBench, name: str) -> None:
    module_bench.assert_verdict(MODULES[name])


def test_an_update_in_place_and_one_by_new_objects_are_always_asked() -> None:
    for _ in range(20):
        ways = _draw_ways(PROFILES["fast"].update_ways)
        assert ways[0] == "data_copy"
        assert {"assign", "swap"} & set(ways)
    assert sorted(_draw_ways(len(UPDATE_WAYS))) == sorted(UPDATE_WAYS)
