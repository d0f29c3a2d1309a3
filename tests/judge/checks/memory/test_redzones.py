"""Accesses beside inputs and outputs are refused, and raw accesses inside them pass."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from tests.judge.sources import SourceBench, SourceCase
from torch_cudal1.judge.checks.memory.redzones import GUARD_BAND, GUARD_PAGE, _run_at_edge
from torch_cudal1.judge.checks.memory.uninitialised_memory import POISON
from torch_cudal1.judge.sandbox.child import CandidateFailure

BESIDE = (
    # elsewhere anything may lie there, NaN too
    "import ctypes\nbeyond = 0.0\nif x.untyped_storage().nbytes() > 4 * x.numel():\n"
    "    beyond = ctypes.c_float.from_address(x.data_ptr() + 4 * x.numel()).value"
)
SOURCES: dict[str, SourceCase] = {
    "a read beyond the end": (
        {
            "before": BESIDE,
            "result": "torch.relu(self.linear(x)) + 0.0 * (0.0 if abs(beyond) < 1e30 else beyond)",
        },
        (GUARD_BAND,),
        "guard_band",
        "beside the inputs",
    ),
    "a store before the start": (
        {
            "before": "import ctypes\nif x.untyped_storage().nbytes() > 4 * x.numel():\n    ctypes.memset(x.data_ptr() - 4, 7, 4)"
        },
        (GUARD_BAND,),
        "guard_band",
        "beside input",
    ),
    "a store beyond the end": (
        {
            "before": "import ctypes\nif x.untyped_storage().nbytes() > 4 * x.numel():\n"
            "    ctypes.memset(x.data_ptr() + 4 * x.numel() + 60000, 7, 4)"
        },
        (GUARD_BAND,),
        "guard_band",
        "beside input",
    ),
    "a read behind the end that nothing shows": (
        {"before": "import ctypes\nctypes.string_at(x.data_ptr() + 4 * x.numel(), 4)"},
        (GUARD_BAND, GUARD_PAGE),
        "guard_page",
        "SIGSEGV",
    ),
    "a read before the start that nothing shows": (
        {"before": "import ctypes\nctypes.string_at(x.data_ptr() - 4, 4)"},
        (GUARD_BAND, GUARD_PAGE),
        "guard_page",
        "SIGSEGV",
    ),
    "an input that is written and restored": (
        {"before": "with torch.no_grad():\n    old = x.clone()\n    x.relu_()\n    x.copy_(old)"},
        (GUARD_BAND, GUARD_PAGE),
        "guard_page",
        "writes to its inputs",
    ),
    "other values at an edge": (
        # a pipe refuses a byte that may not be read; an address alone would not tell, plain inputs
        # may start at a page too
        {
            "top": "import ctypes, os\nLIBC, INTO = ctypes.CDLL(None), os.pipe()[1]\n",
            "before": "sides = (x.data_ptr() - 1, x.data_ptr() + 4 * x.numel())\n"
            "edge = all(LIBC.write(INTO, ctypes.c_void_p(side), 1) < 0 for side in sides)",
            "result": "torch.relu(self.linear(x)) + float(edge)",
        },
        (GUARD_PAGE,),
        "guard_page",
        "is wrong",
    ),
    "a raw read of all of its input": (
        {"before": "import ctypes\nctypes.string_at(x.data_ptr(), 4 * x.numel())"},
        (GUARD_PAGE, GUARD_BAND),
        None,
        "",
    ),
    "a raw store into its own output": (
        {
            "before": "import ctypes\nout = torch.relu(self.linear(x))\ncopy = out.clone()\n"
            "ctypes.memmove(out.data_ptr(), copy.data_ptr(), 64)",
            "result": "out",
        },
        (GUARD_BAND, POISON),
        None,
        "",
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_reaches_beyond_its_tensors_is_refused_and_its_twin_passes(
    bench: SourceBench, name: str
) -> None:
    bench.assert_verdict(SOURCES[name])


@pytest.mark.parametrize("is_late", [True, False])
def test_a_candidate_whose_time_is_up_at_an_edge_has_not_gone_beyond_it(is_late: bool) -> None:
    error = CandidateFailure("run", "killed", "resource", is_late=is_late)
    # As a pool sends it from one process to another.
    assert copy.copy(error).is_late == is_late

    def fail(*_: object) -> None:
        raise error

    trial: Any = SimpleNamespace(call_slot=fail, child=SimpleNamespace(usable=True))
    sample: Any = None
    if is_late:
        with pytest.raises(CandidateFailure):
            _run_at_edge(trial, sample, "end", "candidate", read_only=False)
    else:
        check = _run_at_edge(trial, sample, "end", "candidate", read_only=False)
        assert check is not None
        assert (check.name, check.passed) == ("guard_page", False)
