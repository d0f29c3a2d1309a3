"""Whatever a source leaves behind in its process is named; what honest sources do passes."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.judge.sources import CPU, SourceBench, source, source_bench
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.checks import environment
from torch_cudal1.judge.checks.environment import ENV_DIFF, ENV_DIFF_CALLS, ENV_DIFF_END
from torch_cudal1.judge.checks.module_semantics.modes import TRAIN_MODE
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.reference.source_reference import SourceCandidate
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child, make_limits
from torch_cudal1.judge.worker.global_state import read_global_state

IN_FORWARD = "torch.manual_seed(1)"

ATTACKS: dict[
    str, tuple[dict[str, str], str]
] = {  # what the source does, and the words that name it
    "matmul precision": (
        {"init": "torch.set_float32_matmul_precision('medium')"},
        "matmul.allow_tf32",
    ),
    "cudnn benchmark": (
        {"top": "torch.backends.cudnn.benchmark = True\n"},
        "torch.backends.cudnn.benchmark",
    ),
    "default dtype": (
        {"init": "torch.set_default_dtype(torch.float64)\nself.double().float()"},
        "default_dtype",
    ),
    "threads": ({"before": "torch.set_num_threads(7)"}, "num_threads"),
    "gradient mode": ({"top": "torch.set_grad_enabled(False)\n"}, "grad_enabled"),
    "anomaly mode": ({"top": "torch.autograd.set_detect_anomaly(True)\n"}, "anomaly"),
    "denormals": ({"top": "torch.set_flush_denormal(True)\n"}, "denormals"),
    "attention backends": ({"top": "torch.backends.cuda.enable_flash_sdp(False)\n"}, "flash_sdp"),
    "Inductor's settings": (
        {"top": "import torch._inductor.config as c\nc.max_autotune = True\n"},
        "max_autotune",
    ),
    "a variable": (
        {"top": "import os\nos.environ['CUBLAS_WORKSPACE_CONFIG'] = ':0:0'\n"},
        "CUBLAS_WORKSPACE_CONFIG",
    ),
    "a variable past Python": (
        {"top": "import ctypes\nctypes.CDLL(None).setenv(b'OMP_NUM_THREADS', b'5', 1)\n"},
        "OMP_NUM_THREADS",
    ),
    "working directory": (
        {"top": "import os\nos.mkdir('d')\nos.chdir('d')\n"},
        "working directory",
    ),
    "signal handler": (
        {"top": "import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"},
        "signal handlers",
    ),
    "umask": ({"before": "import os\nos.umask(0)"}, "umask"),
    "trace": ({"top": "import sys\nsys.settrace(lambda *a: None)\n"}, "sys.settrace"),
    "profile": ({"before": "import sys\nsys.setprofile(lambda *a: None)"}, "sys.setprofile"),
    "thread hook": (
        {"top": "import threading\nthreading.excepthook = print\n"},
        "threading.excepthook",
    ),
    "collector": ({"top": "import gc\ngc.disable()\n"}, "gc from"),
    "comparison": ({"top": "torch.allclose = lambda *a, **k: True\n"}, "torch.allclose"),
    "clock": ({"top": "import time\ntime.perf_counter = lambda: 0.0\n"}, "time.perf_counter"),
    "method of tensors": ({"top": "torch.Tensor.stride = torch.Tensor.stride\n"}, "Tensor.stride"),
    "body of a function": (
        {
            "top": "import torch.testing\ntorch.testing.assert_close.__code__ = (lambda *a, **k: None).__code__\n"
        },
        "assert_close",
    ),
    "events": ({"top": "torch.cuda.Event.elapsed_time = lambda a, b: 0.1\n"}, "Event.elapsed_time"),
    "a module's class": (
        {
            "top": "nn.Linear.forward = lambda self, x: nn.functional.linear(x, self.weight, self.bias)\n"
        },
        "Linear.forward",
    ),
    "the judge's worker": (
        {
            "top": "import sys\nfor name in ('__main__', 'torch_cudal1.judge.worker.session'):\n"
            "    if name in sys.modules:\n        sys.modules[name].describe = print\n"
        },
        "describe",
    ),
    "a built-in of the judge": (
        {
            "top": "import sys\nsys.modules['torch_cudal1.judge.wire.properties'].type = lambda x: torch.Tensor\n"
        },
        "judge.wire.properties.type",
    ),
    "a built-in": (
        {"top": "import builtins\nbuiltins.sorted = lambda x, **k: list(x)\n"},
        "builtins.sorted",
    ),
    "table of modules": (
        {"top": "import sys, types\nsys.modules['json'] = types.ModuleType('json')\n"},
        "sys.modules['json']",
    ),
    "an operator of torch": (
        {
            "top": "lib = torch.library.Library('aten', 'IMPL')\nlib.impl('trace', lambda x: x.diagonal().sum(), 'CPU')\n"
        },
        "operators of torch",
    ),
    "an audit hook": ({"top": "import sys\nsys.addaudithook(lambda *a: None)\n"}, "audit hooks"),
    "a hook of all modules": (
        {"init": "nn.modules.module.register_module_forward_pre_hook(lambda *a: None)"},
        "hooks of all modules",
    ),
    "a hook of saved tensors": (
        {"top": "torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: t)\n"},
        "hooks of saved tensors",
    ),
    "a function of torch.nn.utils": (
        {"top": "nn.utils.clip_grad.clip_grad_norm_ = lambda *a, **k: None\n"},
        "clip_grad_norm_",
    ),
    "random state of torch": ({"before": IN_FORWARD}, "random state of torch"),
    "random state of Python": (
        {"before": "import random\nrandom.seed(3)"},
        "random state of random",
    ),
    "numbers drawn": ({"before": "torch.rand(3)"}, "random state of torch"),
    "only at the second call": (
        {
            "init": "self.calls = 0",
            "before": "self.calls += 1\nif self.calls > 1:\n    torch.set_num_threads(5)",
        },
        "calls changed torch.get_num_threads",
    ),
    "only at deletion": (
        {"top": "import weakref\n", "init": "weakref.finalize(self, torch.set_num_threads, 3)"},
        "num_threads",
    ),
    "only at deletion of an instance in use": (
        {
            "top": "import weakref\n",
            "before": "if not torch.rand(()).mul(0):\n    weakref.finalize(self, torch.set_num_threads, 3)",
        },
        "num_threads",
    ),
}

# Other detectors would see a mode left on first: the function mode catches the judge's own reading.
HONEST: dict[str, dict[str, str]] = {
    "the reference": {},
    "set and restored within the call": {
        "before": "old = torch.get_float32_matmul_precision()\ntorch.set_float32_matmul_precision('highest')\n"
        "torch.set_float32_matmul_precision(old)"
    },
    "a generator of its own": {
        "before": "torch.rand(4, generator=torch.Generator().manual_seed(0))"
    },
    "reads the environment": {"top": "import os\nHOME = os.environ.get('HOME')\n"},
    "imports much": {
        "top": "import torch.utils.checkpoint, torch.distributed, torch.fx, torch.utils.cpp_extension, xml.dom, decimal\n"
    },
    "transforms of functions": {
        "top": "torch.func.vmap(torch.sin)(torch.ones(2, 3))\n"
        "torch.func.jvp(torch.sin, (torch.ones(2),), (torch.ones(2),))\n"
    },
    "warning filters": {"top": "import warnings\nwarnings.filterwarnings('ignore')\n"},
    "an operator of its own": {
        "top": "lib = torch.library.Library('mine', 'DEF')\nlib.define('f(Tensor x) -> Tensor')\n"
        "lib.impl('f', lambda x: x * 1, 'CPU')\n"
    },
    "weights drawn at construction": {
        "init": "nn.init.kaiming_uniform_(self.linear.weight)\nimport random\nrandom.random()"
    },
    "a context around the work": {
        "before": "with torch.autocast('cpu', enabled=False), torch.backends.mkldnn.flags(enabled=True):\n    pass"
    },
}


@pytest.mark.parametrize("name", ATTACKS)
def test_each_change_that_a_source_leaves_behind_is_named(bench: SourceBench, name: str) -> None:
    parts, word = ATTACKS[name]
    checks = bench.checks(source(**parts), ENV_DIFF, NUMERICS, ENV_DIFF_CALLS)
    failed = [check for check in checks if not check.passed]
    assert [check.name for check in failed] == ["env_diff"], checks
    assert word in failed[0].detail, failed[0].detail


@pytest.mark.parametrize("name", HONEST)
def test_what_honest_sources_do_passes(bench: SourceBench, name: str) -> None:
    checks = bench.checks(source(**HONEST[name]), ENV_DIFF, NUMERICS, ENV_DIFF_CALLS)
    assert all(check.passed for check in checks), checks[-1].detail
    assert sum(check.name == "env_diff" for check in checks) == 3


@pytest.mark.parametrize("registers", [True, False])
def test_a_kernel_of_torch_past_torchs_library_is_named(
    bench: SourceBench, *, registers: bool
) -> None:
    lines = (
        "lib = torch._C._dispatch_library('IMPL', 'aten', 'CPU', 'file', 1)\n"
        "lib.impl('trace', 'CPU', lambda x: x.diagonal().sum())\n"
    )
    candidate, terms = SourceCandidate(source(top=lines if registers else "")), Contract()
    # Only of a stranger's process the operators are read.
    with Child(make_limits(Settings(), CPU, trust="foreign"), terms) as child:
        assert child.surroundings["operators"]
        trial = Trial(bench.reference, candidate, terms, CPU, child, bench.examples)
        trial.load("candidate", candidate)
        (check,) = ENV_DIFF.run(trial)
    assert check.passed is not registers
    assert ("kernels of PyTorch's operators" in check.detail) is registers


def test_a_compiled_source_leaves_nothing_that_counts(bench: SourceBench) -> None:
    text = source(
        init="self.__dict__['fast'] = torch.compile(self.linear)", result="torch.relu(self.fast(x))"
    )
    checks = bench.checks(text, ENV_DIFF, NUMERICS, ENV_DIFF_CALLS)
    assert all(check.passed for check in checks), checks[-1].detail


def test_what_only_training_changes_is_named_at_the_end(bench: SourceBench) -> None:
    text = source(before="if self.training:\n    torch.set_flush_denormal(True)")
    checks = bench.checks(text, ENV_DIFF, NUMERICS, ENV_DIFF_CALLS, TRAIN_MODE, ENV_DIFF_END)
    (failed,) = (check for check in checks if not check.passed)
    assert (failed.name, failed) == ("env_diff", checks[-1])
    assert "all that was asked changed denormals are flushed" in failed.detail


def test_a_reference_that_draws_numbers_lets_its_candidate_draw_them() -> None:
    draws = "nn.functional.dropout(x, 0.5, training=True) * 0 + torch.relu(self.linear(x))"
    from tests.judge.sources import FORWARD, REFERENCE

    with source_bench(REFERENCE.replace(FORWARD, draws)) as dropout_bench:
        checks = dropout_bench.checks(source(result=draws), NUMERICS, ENV_DIFF_CALLS)
        assert all(check.passed for check in checks), checks[-1].detail


@pytest.mark.parametrize("group", ["flags", "process", "interpreter", "environment", "operators"])
def test_a_changed_value_of_each_group_is_a_change(group: str) -> None:
    before = read_global_state(torch.device("cpu"), operators=True)
    after = copy.deepcopy(before)
    after[group][next(iter(after[group]))] = "other"
    assert len(list(environment._list_changes(before, after))) == 1


@pytest.mark.parametrize("group", ["modules", "identities"])
def test_another_object_behind_a_name_is_a_change_and_so_is_one_that_was_put_back(
    group: str,
) -> None:
    before = read_global_state(torch.device("cpu"))
    after = copy.deepcopy(before)
    name = next(iter(after[group]))
    after[group][name] = (
        {**after[group][name], next(iter(after[group][name])): [1]} if group == "identities" else 1
    )
    after["digests"][group] = "other"
    assert len(environment._list_replacements(before, after)) == 1
    assert environment._list_replacements(before, before) == [
        "what stands behind a name, and put it back when it was asked for"
    ]
