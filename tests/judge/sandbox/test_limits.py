"""Each limit of a child ends its work with a reason: memory, time and the size of a file."""

from __future__ import annotations

import os
import time

import pytest
import torch

from tests.judge.sandbox.foreign_children import HONEST, load_source, start_foreign_child
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, make_limits
from torch_cudal1.judge.sandbox.confine import landlock, seccomp

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    not landlock.find_version() or not seccomp.is_supported(),
    reason="foreign code is refused here: level 1 only",
)


def test_allocating_all_memory_is_a_reason_and_the_next_child_works() -> None:
    limits = make_limits(
        Settings(memory_limit_gib=1.0, candidate_timeout_s=60.0), CPU, trust="foreign", phase="run"
    )
    with Child(limits, Contract()) as child:
        with pytest.raises(CandidateFailure, match="memory") as error_info:
            load_source(
                child, "import torch\nheld = []\nwhile True: held.append(torch.ones(1 << 24))"
            )
        assert error_info.value.detector == "resource"
    with Child(limits, Contract()) as child:
        load_source(child, HONEST)


def test_foreign_code_has_a_memory_limit_without_a_setting() -> None:
    assert make_limits(Settings(), CPU, trust="foreign").memory_bytes > 0
    assert make_limits(Settings(), CPU).memory_bytes == 0


def test_endless_output_fills_no_file_and_ends_at_the_deadline() -> None:
    with start_foreign_child(deadline_s=4.0) as child:
        before = os.fstat(child._log.fileno()).st_size
        with pytest.raises(CandidateFailure, match="deadline") as error_info:
            load_source(child, "while True: print('PASS' * 1000)")
        assert "PASS" in error_info.value.found
        assert before == 0
        assert len(str(error_info.value)) < 2_000


def test_sleeping_for_ever_ends_at_the_deadline() -> None:
    started_s = time.monotonic()
    with (
        start_foreign_child(deadline_s=3.0) as child,
        pytest.raises(CandidateFailure, match="deadline"),
    ):
        load_source(child, "import time; time.sleep(3600)")
    assert time.monotonic() - started_s < 60


def test_a_file_larger_than_allowed_is_an_error() -> None:
    with (
        start_foreign_child(file_bytes=1 << 20) as child,
        pytest.raises(CandidateFailure, match=r"File too large|SIGXFSZ"),
    ):
        load_source(
            child,
            "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nopen('big', 'wb').write(b'x' * (1 << 22))",
        )
