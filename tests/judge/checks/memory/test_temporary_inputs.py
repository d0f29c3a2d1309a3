"""What nothing but the call holds may still be somebody's memory."""

from __future__ import annotations

import pytest

from tests.judge.sources import FORWARD, SourceBench, SourceCase
from torch_cudal1.judge.checks.memory.temporary_inputs import TEMPORARY_INPUTS
from torch_cudal1.judge.checks.spec import CheckSpec

CHECKS: tuple[CheckSpec, ...] = (TEMPORARY_INPUTS,)


def write_input_if(condition: str) -> dict[str, str]:
    """A module whose result is right, and which then writes to its input."""
    return {
        "top": "import sys\n",
        "before": f"kept = {FORWARD}\nif {condition}:\n    x.zero_()",
        "result": "kept",
    }


SOURCES: dict[str, SourceCase] = {
    "an input with few references": (
        write_input_if("sys.getrefcount(x) <= 6"),
        CHECKS,
        "temporary_inputs",
        "a temporary view: the call wrote to the memory of input ",
    ),
    "one that is no view either": (
        write_input_if("sys.getrefcount(x) <= 6 and x._base is None"),
        CHECKS,
        "temporary_inputs",
        "a temporary tensor: the call wrote to the memory of input ",
    ),
    "a wrong result": (
        {"result": f"{FORWARD} * (1 if sys.getrefcount(x) > 6 else 2)", "top": "import sys\n"},
        CHECKS,
        "temporary_inputs",
        "a temporary view: ",
    ),
    "nothing is written": ({}, CHECKS, None, ""),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_takes_what_it_is_lent_is_refused(bench: SourceBench, name: str) -> None:
    bench.assert_verdict(SOURCES[name])
