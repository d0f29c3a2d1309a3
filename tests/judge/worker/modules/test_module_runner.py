"""A module asked on another device meets copies there, and what it leaves on its own one is
refused. With GPUs: `guard_domain`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_flatten

from tests.judge.programs import candidate, linear_relu, subject
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.checks.module_semantics.modes import GUARD_DOMAIN
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child, make_limits
from torch_cudal1.judge.wire.call_spec import CallSpec, RunMode, find_tensor_order, pack_arguments
from torch_cudal1.judge.worker.modules import module_runner
from torch_cudal1.judge.worker.modules.module_runner import ModuleRunner
from torch_cudal1.judge.worker.modules.source_modules import import_source

X, Y = torch.ones(2), torch.zeros(2)

CPU = torch.device("cpu")
SOURCE = """
import torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        self.seen = x
        return {result}
"""


def make_runner_on_other_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch, result: str
) -> tuple[ModuleRunner, torch.Tensor]:
    """A runner "elsewhere", the other device being the CPU as well, so that only the copies tell
    the two apart.
    """
    monkeypatch.setattr(module_runner, "_find_next_gpu", lambda device: CPU)
    x = torch.randn(3)
    call = pack_arguments({"args": [x], "kwargs": {}}, [])
    form = CallSpec("ModelNew", pack_arguments({"args": [], "kwargs": {}}, None), (), call)
    return ModuleRunner(
        import_source(SOURCE.format(result=result), folder), form, RunMode(other_gpu=True), CPU
    ), x


def test_the_module_meets_copies_and_its_results_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, x = make_runner_on_other_device(tmp_path, monkeypatch, "x * 2")
    for _ in range(2):
        (out,) = runner([x])
        assert out is not None
        assert torch.equal(out, 2 * x)
        input_of_module: torch.Tensor = vars(runner.instance)["seen"]
        assert input_of_module.data_ptr() != x.data_ptr()
        x.add_(1)  # new values at the old address arrive too


def test_a_result_that_is_not_where_its_inputs_are_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, x = make_runner_on_other_device(
        tmp_path, monkeypatch, "torch.empty_like(x, device='meta')"
    )
    with pytest.raises(SandboxError, match="a result on meta, expected cpu, where its inputs are"):
        runner([x])


def test_a_cpu_has_no_other_device(tmp_path: Path) -> None:
    form = CallSpec(
        "ModelNew",
        pack_arguments({"args": [], "kwargs": {}}, None),
        (),
        pack_arguments({"args": [torch.ones(1)], "kwargs": {}}, []),
    )
    with pytest.raises(SandboxError, match="there is no other GPU than cpu here"):
        ModuleRunner(
            import_source(SOURCE.format(result="x"), tmp_path), form, RunMode(other_gpu=True), CPU
        )


def test_guard_domain_says_why_it_asks_nothing() -> None:
    region = linear_relu()
    with Child(make_limits(Settings(), CPU), Contract()) as child:
        (check,) = GUARD_DOMAIN.run(
            Trial(subject(region), candidate(region.program), Contract(), CPU, child)
        )
    assert check.passed
    assert "not applicable: the devices of a Program's tensors are in its guard" in check.detail


@pytest.mark.parametrize(
    ("args", "kwargs", "order"),
    [
        ((X, Y), {}, [0, 1]),
        ((), {}, []),
        ((X, 2.0), {}, None),
        (([X, Y],), {}, None),
        ((X,), {"scale": Y}, None),
        ((X, torch.float32), {}, None),
    ],
)
def test_only_a_call_of_tensors_alone_is_made_without_unpacking(
    args: tuple[object, ...], kwargs: dict[str, object], order: list[int] | None
) -> None:
    assert find_tensor_order(pack_arguments({"args": args, "kwargs": kwargs}, [])) == order


def test_the_nesting_of_a_result_is_answered_for_a_single_tensor_too(tmp_path: Path) -> None:
    text = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x, how):\n        return x if how else (x, [x, 3])\n"
    source = import_source(text, tmp_path)

    def tree(how: int) -> str:
        form = CallSpec(
            "Model",
            pack_arguments({"args": (), "kwargs": {}}, None),
            (),
            pack_arguments({"args": (X, how), "kwargs": {}}, []),
        )
        runner = ModuleRunner(source, form, RunMode(), torch.device("cpu"))
        assert runner.tree == ""
        runner([X])
        return runner.tree

    assert tree(1) == f"{tree_flatten(X)[1]}[None]"
    assert tree(0) == f"{tree_flatten((X, [X, 3]))[1]}[None, None, '3']"
