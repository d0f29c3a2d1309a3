"""Targets: every form that leads to a module, and one paragraph for every way it can go wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from torch_cudal1.api.targets import LoadedTarget, expand, load, try_call
from torch_cudal1.core.errors import TargetError

HEAD = "import torch\nfrom torch import nn\n"
PAIR = HEAD + "def build():\n    return nn.Linear(3, 2), (torch.randn(4, 3),)\n"
KERNELBENCH = HEAD + (
    "class Model(nn.Module):\n"
    "    def __init__(self, n, scale=1.0):\n        super().__init__()\n        self.l, self.scale = nn.Linear(n, n), scale\n"
    "    def forward(self, x):\n        return self.l(x) * self.scale\n"
    "def get_inputs():\n    return [torch.randn(2, 5)]\n"
    "def get_init_inputs():\n    return %s\n"
)


def write_target(folder: Path, source: str, name: str = "model.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return path


def test_a_file_and_a_callable_give_the_module_and_its_inputs(tmp_path: Path) -> None:
    path = write_target(tmp_path, PAIR)
    (loaded,) = load(f"{path}:build")
    assert loaded.name == f"{path}:build"
    assert loaded.module(*loaded.inputs).shape == (4, 2)


def test_a_package_and_a_callable_are_found_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_target(tmp_path, PAIR, "cudal1_test_package/inner.py")
    write_target(tmp_path, "", "cudal1_test_package/__init__.py")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    (loaded,) = load("cudal1_test_package.inner:build")
    assert isinstance(loaded.module, torch.nn.Linear)
    assert sys.path == before


@pytest.mark.parametrize(("init", "scale"), [("[5]", 1.0), ("[[5], {'scale': 3.0}]", 3.0)])
def test_a_kernelbench_file_is_built_from_its_three_names(
    tmp_path: Path, init: str, scale: float
) -> None:
    (loaded,) = load(str(write_target(tmp_path, KERNELBENCH % init)))
    assert loaded.module.scale == scale
    assert loaded.inputs[0].shape == (2, 5)


def test_a_folder_gives_its_kernelbench_files_in_natural_order_and_runs_no_other(
    tmp_path: Path,
) -> None:
    for name in ("10_b.py", "2_a.py", "deep/1_c.py"):
        write_target(tmp_path, KERNELBENCH % "[5]", name)
    write_target(tmp_path, "raise SystemExit('a helper was run')\n", "helper.py")
    assert [Path(name).name for name in expand(str(tmp_path))] == ["2_a.py", "10_b.py", "1_c.py"]
    assert len(load(str(tmp_path))) == 3


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    first = write_target(tmp_path, PAIR, "a/model.py")
    second = write_target(tmp_path, PAIR.replace("3, 2", "3, 7"), "b/model.py")
    widths = [load(f"{path}:build")[0].module.out_features for path in (first, second)]
    assert widths == [2, 7]


def test_weights_and_inputs_are_the_same_at_every_load_and_the_users_random_state_is_untouched(
    tmp_path: Path,
) -> None:
    path = write_target(tmp_path, PAIR)
    state = torch.random.get_rng_state()
    first, second = (load(f"{path}:build")[0] for _ in range(2))
    assert torch.equal(first.module.weight, second.module.weight)
    assert torch.equal(first.inputs[0], second.inputs[0])
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_single_tensor_and_nested_containers_are_inputs(tmp_path: Path) -> None:
    path = write_target(
        tmp_path,
        HEAD
        + "def one(): return nn.ReLU(), torch.ones(2)\ndef deep(): return nn.ReLU(), ([torch.ones(2), {'k': 1}],)\n",
    )
    assert load(f"{path}:one")[0].inputs[0].shape == (2,)
    assert load(f"{path}:deep")[0].inputs[0][1] == {"k": 1}


BROKEN = [
    ("def build(): return 3", "build", "it returned 'int'; a pair (module, inputs) is needed"),
    ("def build(): return nn.ReLU(), (torch.ones(1),), 3", "build", "it returned 'tuple' of 3"),
    (
        "def build(): return nn.ReLU, (torch.ones(1),)",
        "build",
        "the first of the pair is of type 'type'; a torch.nn.Module is needed",
    ),
    (
        "def build(): return nn.ReLU(), {'x': torch.ones(1)}",
        "build",
        "the inputs are of type 'dict'; a tuple of positional inputs",
    ),
    (
        "def build(): return nn.ReLU(), ([1, open],)",
        "build",
        "inputs[0][1] is of type 'builtins.builtin_function_or_method'",
    ),
    ("def build(): return nn.ReLU(), (1, 2)", "build", "the inputs hold no tensor"),
    (
        "def build(): return 1 / 0",
        "build",
        "building it failed with ZeroDivisionError: division by zero at",
    ),
    ("def build(): raise SystemExit(3)", "build", "building it failed with SystemExit: 3"),
    (
        "def build(need): pass",
        "build",
        "building it failed with TypeError: build() missing 1 required positional argument",
    ),
    ("def other(): pass", "build", "it holds no callable 'build'; callables there: other"),
    ("build = 3", "build", "it holds an object of type 'int', not a callable, as 'build'"),
    (
        "import no_such_package_xyz",
        "build",
        "importing it failed with ModuleNotFoundError: No module named 'no_such_package_xyz' at",
    ),
    (
        "raise RuntimeError('at import')",
        "build",
        "importing it failed with RuntimeError: at import at",
    ),
    ("def build(:\n", "build", "the file is not valid Python"),
    (
        "class Model: pass",
        "",
        "the file defines no get_inputs, no get_init_inputs, and no ':callable'",
    ),
]


@pytest.mark.parametrize(
    ("source", "callable_name", "problem"), BROKEN, ids=[b[2][:40] for b in BROKEN]
)
def test_a_broken_file_is_told_in_one_paragraph(
    tmp_path: Path, source: str, callable_name: str, problem: str
) -> None:
    path = write_target(tmp_path, HEAD + source + "\n")
    with pytest.raises(TargetError) as caught:
        load(f"{path}:{callable_name}" if callable_name else str(path))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_whose_import_failed_leaves_no_half_made_module(tmp_path: Path) -> None:
    path = write_target(tmp_path, HEAD + "raise RuntimeError('at import')\n")
    with pytest.raises(TargetError):
        load(f"{path}:build")
    assert not [
        module for module in sys.modules.values() if getattr(module, "__file__", None) == str(path)
    ]


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("no/such/file.py:build", "there is no file 'no/such/file.py'"),
        ("no/such/file.py", "there is no file"),
        ("no_such_package_xyz.module:build", "there is no package 'no_such_package_xyz'"),
        ("torch.nn", "there is no file or folder 'torch.nn', and no ':callable'"),
        ("torch.nn:no_such", "it holds no callable 'no_such'"),
    ],
)
def test_a_target_that_leads_nowhere_says_what_was_looked_for(target: str, problem: str) -> None:
    with pytest.raises(TargetError, match=r"Expected file\.py:callable") as caught:
        load(target)
    assert problem in str(caught.value)


def test_an_empty_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="holds no KernelBench-style file"):
        load(str(tmp_path))


def test_the_place_of_an_error_is_in_the_users_file_not_in_torch(tmp_path: Path) -> None:
    path = write_target(
        tmp_path, HEAD + "def build():\n    return nn.Linear(-1, 2), (torch.ones(1),)\n"
    )
    with pytest.raises(TargetError) as caught:
        load(f"{path}:build")
    assert f"{path}:4 in build" in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="cannot be moved to 'cuda'"):
        load(f"{write_target(tmp_path, PAIR)}:build", device="cuda")


def test_inputs_that_do_not_fit_are_the_targets_problem() -> None:
    with pytest.raises(
        TargetError, match="calling the module with its inputs failed with RuntimeError"
    ):
        try_call(LoadedTarget("t", torch.nn.Linear(3, 3), (torch.ones(2, 5),)))
