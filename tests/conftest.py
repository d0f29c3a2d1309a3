"""Fixtures that several files share, and one question to the compiler that is asked once for all
workers.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch

from tests.entries import Runs, count_runs
from tests.matrix_table import find_cases_outside_share, mark_matrix_cases
from torch_cudal1.core import telemetry


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--matrix-share`: how much of the large matrices a run has."""
    parser.addoption(
        "--matrix-share",
        default="0/1",
        metavar="K/N",
        help="of the cases that `make test` leaves out, every N-th from the K-th on (default: all)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tests that need no quick tier do not wait for it: a miss runs the baseline unless a test says
    otherwise. What one process of a test decides, the next must find, however busy the machine is.

    Of a run with several workers: what Inductor finds out about vector instructions holds for every
    process of the run. It compiles and loads a file for each kind, in each process with an empty cache of Inductor's: 8
    s of a CPU.
    """
    os.environ.setdefault("TORCH_CUDAL1_ON_MISS", "baseline")
    os.environ.setdefault("TORCH_CUDAL1_REMEASURE", "false")
    if (
        getattr(config.option, "numprocesses", None)
        and not hasattr(config, "workerinput")
        and every_vector_kind_compiles()
    ):
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def every_vector_kind_compiles() -> bool:
    """Whether Inductor uses all kinds of vector instructions that this CPU has."""
    from torch._inductor import config as inductor  # seconds to import
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    kinds = valid_vec_isa_list()
    with inductor.patch({"cpp.vec_isa_ok": True}):
        return bool(kinds == valid_vec_isa_list.__wrapped__())


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Counts the calls that planted Programs serve."""
    return count_runs(monkeypatch)


@pytest.fixture(autouse=True)
def seed_generators() -> None:
    """The same numbers in every run, in whatever order and beside whatever else tests run. What the
    judge draws stays secret.
    """
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture
def clean() -> None:
    """Counters at zero."""
    telemetry.reset()


@pytest.fixture
def inference(clean: None) -> Iterator[None]:
    """`clean`, without gradients."""
    with torch.no_grad():
        yield


@pytest.fixture
def dynamo(clean: None) -> Iterator[None]:
    """`clean`, with nothing compiled by an earlier test or left to a later one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves to `make test-all`, and leave out what belongs to other shares of
    it; skip what needs a GPU where there is none.
    """
    mark_matrix_cases(items)
    if outside := find_cases_outside_share(items, config.getoption("--matrix-share")):
        config.hook.pytest_deselected(items=outside)
        left_out = set(outside)
        items[:] = [item for item in items if item not in left_out]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
