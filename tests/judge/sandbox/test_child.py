"""Whatever the child does, it costs the candidate only: the parent gets a value, and nothing stays
behind.
"""

from __future__ import annotations

import contextlib
import os
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.judge.programs import candidate, linear_relu
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Candidate, Contract, Rejected
from torch_cudal1.judge import BaselineRanking, EvaluationConfig, evaluate_candidate
from torch_cudal1.judge.benchmark.same_core import find_descendants
from torch_cudal1.judge.sandbox import child as child_module
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, Limits
from torch_cudal1.judge.sandbox.limits import make_limits

CPU = torch.device("cpu")
REGION = linear_relu()
RANKING = BaselineRanking(Candidate(REGION.program, "eager", "baseline"), {"eager": 100.0})
ATTACKS = {  # what the child does instead of answering "run", the detector, a word of the reason
    "segfault": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "resource", "SIGSEGV"),
    "killed": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "resource", "SIGKILL"),
    "hang": ("import time; time.sleep(600)", "resource", "deadline"),
    "memory": ("x = bytearray(1 << 40)", "resource", "memory"),
    "tensor_memory": ("import torch; torch.empty(1 << 40).fill_(1)", "resource", "memory"),
    "early_exit": (
        "import os; print('PASS speedup 100x', flush=True); os._exit(0)",
        "protocol",
        "PASS",
    ),
    "garbage": (
        "import os; os.write(FD, b'\\x00\\x00\\x00\\x04PASS'); import time; time.sleep(600)",
        "protocol",
        "garbage",
    ),
    "huge_frame": (
        "import os; os.write(FD, b'\\xff' * 64); import time; time.sleep(600)",
        "protocol",
        "announced",
    ),
    "forged": ("return {'layout': [], 'facts': [], 'passed': True}", "protocol", "unreadable"),
    "no_facts": ("return {**original(session, request), 'facts': None}", "protocol", "properties"),
    "old_nonce": (
        "import os, json; b = json.dumps({'nonce': 'x', 'verdict': 'passed'}).encode(); "
        "os.write(FD, len(b).to_bytes(4, 'big') + b); import time; time.sleep(600)",
        "protocol",
        "nonce",
    ),
    "exception": ("raise ValueError('a candidate may raise')", "run", "may raise"),
}


@pytest.fixture
def misbehaving_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Start children with a worker whose verb "run" does something else."""

    def install(body: str) -> None:
        code = f"""
        import sys
        from torch_cudal1.judge.worker import session as worker
        FD = int(sys.argv[1])
        original = worker.HANDLERS["run"]
        def run(session, request):
            {body}
        worker.HANDLERS["run"] = run
        if __name__ == "__main__":
            worker.main(FD)
        """
        (tmp_path / "evil_worker.py").write_text(textwrap.dedent(code))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(child_module, "WORKER", "evil_worker")

    return install


def list_living_members(group: int) -> list[str]:
    """Processes of a group that are no zombies (an orphan waits for an init process, which a
    container may lack).
    """
    fields = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields.append(path.read_text().rpartition(")")[2].split())
    return [" ".join(f) for f in fields if int(f[2]) == group and f[0] != "Z"]


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_a_child_that_misbehaves_is_a_rejected_value(misbehaving_worker, name: str) -> None:
    body, detector, reason_word = ATTACKS[name]
    misbehaving_worker(body)
    limit = 4.0 if name in ("hang", "garbage", "huge_frame", "old_nonce") else 60.0
    config = EvaluationConfig(
        Settings(candidate_timeout_s=limit, memory_limit_gib=4.0), Contract(), CPU
    )
    started_s = time.monotonic()
    decision = evaluate_candidate(REGION, candidate(REGION.program), RANKING, config).decision
    assert isinstance(decision, Rejected)
    assert decision.detector == detector, decision
    assert reason_word in decision.reason
    assert time.monotonic() - started_s < 45


def test_noise_on_standard_output_is_no_failure(misbehaving_worker) -> None:
    misbehaving_worker("print('PASS', flush=True); return original(session, request)")
    evaluation = evaluate_candidate(
        REGION, candidate(REGION.program), RANKING, EvaluationConfig(Settings(), Contract(), CPU)
    )
    assert evaluation.verdict.passed, evaluation.verdict.failure


def test_no_process_and_no_file_of_a_child_stays_behind(misbehaving_worker) -> None:
    misbehaving_worker(
        "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
    )
    with Child(Limits(CPU, 3.0), Contract()) as child:
        group, scratch = child.pid, child.scratch
        with pytest.raises(CandidateFailure, match="deadline"):
            child.call("run")
    assert not scratch.exists()
    assert not list_living_members(group)


def interrupt_child(children: list[Child]) -> None:
    with Child(Limits(CPU, 30.0), Contract()) as child:
        children.append(child)
        raise KeyboardInterrupt


def test_an_interrupt_kills_the_child_and_deletes_the_scratch() -> None:
    children: list[Child] = []
    with pytest.raises(KeyboardInterrupt):
        interrupt_child(children)
    pid, scratch = children[0].pid, children[0].scratch
    assert not scratch.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_child_sees_a_clean_environment_and_closed_files(
    misbehaving_worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "a secret")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/kept")
    secret = open(tmp_path / "secret", "w")  # noqa: SIM115
    misbehaving_worker(
        "import os; links = [f'/proc/self/fd/{f}' for f in os.listdir('/proc/self/fd')]; "
        "return {'environment': dict(os.environ), 'files': [os.readlink(f) for f in links if os.path.exists(f)]}"
    )
    with secret, Child(Limits(CPU, 30.0), Contract()) as child:
        answer = child.call("run")
    assert "HF_TOKEN" not in answer["environment"]
    assert answer["environment"]["TRITON_CACHE_DIR"] == "/kept"
    assert answer["environment"]["TMPDIR"].startswith(("/dev/shm", "/tmp"))
    assert not any("secret" in name for name in answer["files"])


@pytest.mark.parametrize("has_compile_pool", [True, False])
def test_a_child_that_is_timed_beside_another_compiles_in_its_own_process(
    has_compile_pool: bool, misbehaving_worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "2")
    misbehaving_worker(
        "from torch._inductor import async_compile; async_compile.maybe_warm_pool(); return {'done': True}"
    )
    limits = make_limits(Settings(), CPU, has_compile_pool=has_compile_pool)
    with Child(replace(limits, deadline_s=300.0), Contract()) as child:
        before = find_descendants(child.pid)
        assert child.call("run")["done"]
        assert (len(find_descendants(child.pid)) > len(before)) == has_compile_pool


def test_a_child_that_cannot_start_is_no_failure_of_the_candidate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scratches: list[Path] = []
    make_scratch = child_module.make_scratch
    monkeypatch.setattr(
        child_module, "make_scratch", lambda: scratches.append(make_scratch()) or scratches[-1]
    )
    monkeypatch.setattr(child_module, "WORKER", "there_is_no_such_module")
    with pytest.raises(SandboxError, match="there_is_no_such_module"):
        evaluate_candidate(
            REGION,
            candidate(REGION.program),
            RANKING,
            EvaluationConfig(Settings(), Contract(), CPU),
        )
    assert scratches
    assert not any(path.exists() for path in scratches)


def test_a_child_that_was_ended_takes_no_request(misbehaving_worker) -> None:
    misbehaving_worker("import os; os._exit(3)")
    with Child(Limits(CPU, 30.0), Contract()) as child:
        with pytest.raises(CandidateFailure, match="status 3"):
            child.call("run")
        assert not child.usable
        with pytest.raises(CandidateFailure, match="given up"):
            child.call("run")
        with pytest.raises(CandidateFailure, match="given up"):  # its scratch folder may be gone
            child.reserve_file()


@pytest.mark.parametrize(
    ("error", "gpu_is_lost"),
    [
        ("import torch; raise torch.AcceleratorError('an illegal memory access')", True),
        (
            "from torch_cudal1.core.errors import DriverError; raise DriverError('cuInit', 'CUDA_ERROR_ILLEGAL_ADDRESS', 'hint')",
            True,
        ),
        ("import torch; raise torch.OutOfMemoryError('none left')", False),
        ("raise ValueError('of its own')", False),
    ],
)
def test_a_child_that_lost_its_gpu_is_given_up_and_one_with_another_error_is_not(
    misbehaving_worker, error: str, *, gpu_is_lost: bool
) -> None:
    misbehaving_worker(error)
    with Child(Limits(CPU, 30.0), Contract()) as child:
        with pytest.raises(CandidateFailure):
            child.call("run")
        assert child.usable is not gpu_is_lost


def test_a_long_error_keeps_both_ends() -> None:
    """A traceback begins with what was done and ends with what went wrong."""
    shortened = child_module._cut_middle(
        "InductorError: " + "x" * 9_000 + " RuntimeError: no GPU backend"
    )
    assert shortened.startswith("InductorError: ")
    assert shortened.endswith("RuntimeError: no GPU backend")
    assert len(shortened) < 2_100
    assert child_module._cut_middle("short") == "short"
