"""The evaluator on a GPU: scores repeat, cheats are refused, and slots share the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.bench_evaluator import _CHAIN, _REFERENCE, generate_programs
from tests.training.sources import program
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.pool import mps
from torch_cudal1.judge.pool.judge_evaluator import JudgeEvaluator
from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.judge.pool.measurement_settings import MeasurementSettings
from torch_cudal1.training.naive import NaiveEvaluator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]
ROWS, WIDTH = 4096, 4096  # 50 us and more on the fastest of GPUs
TASK = TrainingTask(_CHAIN, _REFERENCE.format(result=_CHAIN, rows=ROWS, width=WIDTH))
SIDE_STREAM = """
import torch
class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.own = torch.cuda.Stream()
    def forward(self, x):
        y = torch.empty_like(x)
        with torch.cuda.stream(self.own):
            y.copy_(torch.relu(x)).mul_(2).add_(1)
        return y
"""
REPLAYED = """
import torch
SEEN = {}
class ModelNew(torch.nn.Module):
    def forward(self, x):
        key = x.data_ptr()
        if key not in SEEN:
            SEEN[key] = torch.relu(x) * 2 + 1
        return SEEN[key]
"""


@pytest.fixture(scope="session")
def locks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all test processes on this GPU, so that none of these tests validates while another one
    times.
    """
    return tmp_path_factory.getbasetemp().parent / "locks-of-the-gpu"


@pytest.fixture(scope="module")
def settings(locks: Path) -> MeasurementSettings:
    return MeasurementSettings(Settings(), Contract(), torch.device("cuda"), locks)


@pytest.fixture(scope="module")
def evaluator(settings: MeasurementSettings) -> Iterator[JudgeEvaluator]:
    with JudgeEvaluator(settings, slots=2) as evaluator:
        yield evaluator


def test_right_triton_programs_have_scores_and_wrong_ones_have_none(
    evaluator: JudgeEvaluator,
) -> None:
    stream = generate_programs(_CHAIN, "cuda", WIDTH)
    requests = [next(stream) for _ in range(8)]
    results = evaluator.measure(TASK, requests)
    for index, result in enumerate(results):
        assert result.outcome in (("wrong",) if index % 4 == 3 else ("ok", "unstable")), (
            result
        )  # others may use this GPU
        assert result.score is None or result.score > 1.0


def test_the_same_program_measured_again_has_about_the_same_score_or_none(
    evaluator: JudgeEvaluator,
) -> None:
    """A foreign program is timed on the wall: on a busy host it may have no score, and Python's
    launches are in it.
    """
    right = next(generate_programs(_CHAIN, "cuda", WIDTH))
    twins = [program(f"twin {index}", right.source + f"\n# {index}\n") for index in range(4)]
    results = evaluator.measure(TASK, twins)
    assert {result.outcome for result in results} <= {"ok", "unstable"}, results
    logs = [math.log(result.score) for result in results if result.score is not None]
    assert len(logs) >= 2, [(result.outcome, result.detail) for result in results]
    assert max(logs) - min(logs) < 0.25


@pytest.mark.parametrize("text", [SIDE_STREAM, REPLAYED], ids=["side stream", "replayed"])
def test_cheats_of_a_gpu_are_refused(evaluator: JudgeEvaluator, text: str) -> None:
    (result,) = evaluator.measure(TASK, [program("cheat " + text, text)])
    assert result.outcome in ("hack", "wrong", "run"), result


def test_the_naive_clock_does_not_see_another_stream(settings: MeasurementSettings) -> None:
    cheats = [program(f"p{index}", f"{SIDE_STREAM}# {index}\n") for index in range(3)]
    with NaiveEvaluator(settings) as naive:
        results = naive.measure(TASK, cheats)
    right_looking = [
        result for result in results if result.outcome in ("ok", "unstable")
    ]  # right, as far as it looks; a busy GPU is late at times
    assert right_looking, results
    assert all(result.score is None or result.score > 2 for result in right_looking)


def test_programs_of_templates_share_processes(locks: Path) -> None:
    own_settings = MeasurementSettings(
        Settings(), Contract(), torch.device("cuda"), locks, trust="own"
    )
    stream = generate_programs(_CHAIN, "cuda", WIDTH)
    with JudgeEvaluator(own_settings) as evaluator:
        results = evaluator.measure(TASK, [next(stream) for _ in range(6)])
        assert [result.outcome for result in results].count("wrong") == 1, results
        assert evaluator._slot is not None
        assert evaluator._slot._processes.kept is not None
        assert evaluator._slot._processes.loans >= 3, (
            "after the fifth program one process had served most of them"
        )


def test_a_slow_host_is_not_in_the_score_of_an_own_program(locks: Path) -> None:
    own_settings = MeasurementSettings(
        Settings(), Contract(), torch.device("cuda"), locks, trust="own"
    )
    text = next(generate_programs(_CHAIN, "cuda", WIDTH)).source
    forward = "def forward(self, given):\n"
    slow = "import time\n" + text.replace(forward, f"{forward}        time.sleep(2e-4)\n")
    assert slow.count("time.") == 1, slow
    with JudgeEvaluator(own_settings) as evaluator:
        scores = [
            result.score
            for result in evaluator.measure(TASK, [program("plain", text), program("slow", slow)])
        ]
    assert None not in scores
    assert max(filter(None, scores)) < 1.05 * min(filter(None, scores)), scores


@pytest.mark.parametrize("text", [SIDE_STREAM, REPLAYED], ids=["side stream", "replayed"])
def test_cheats_among_own_programs_are_refused_too(locks: Path, text: str) -> None:
    own_settings = MeasurementSettings(
        Settings(), Contract(), torch.device("cuda"), locks, trust="own"
    )
    with JudgeEvaluator(own_settings) as evaluator:
        (result,) = evaluator.measure(TASK, [program("cheat", text)])
    assert result.outcome in ("hack", "wrong", "run"), result


def test_the_results_of_an_own_program_are_in_no_memory_that_the_next_one_gets(
    locks: Path,
) -> None:
    own_settings = MeasurementSettings(
        Settings(), Contract(), torch.device("cuda"), locks, trust="own"
    )
    unwritten = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return torch.empty_like(x)\n"
    with JudgeEvaluator(own_settings) as evaluator:
        (right,) = evaluator.measure(TASK, [next(generate_programs(_CHAIN, "cuda", WIDTH))])
        (result,) = evaluator.measure(TASK, [program("left", unwritten)])
        slot = evaluator._slot
        assert right.outcome == "ok", right
        assert result.outcome == "wrong", result
        assert "NaN or infinity differs" in result.detail, (
            "its memory held no result of the program before"
        )
        assert slot is not None
        assert slot._processes.kept is not None
        kept_bytes = [slot._processes.kept.call("usage")["usage"]["gpu_used_bytes"]]
        slot._processes.free_gpu_memory()
        assert slot._processes.kept is not None
        kept_bytes.append(slot._processes.kept.call("usage")["usage"]["gpu_used_bytes"])
    assert kept_bytes[0] - kept_bytes[1] >= 4 * ROWS * WIDTH, (
        "memory stays with the process until another reference comes"
    )


FAULTY = """
import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at + (1 << 45), tl.load(x + at))


class ModelNew(torch.nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        kernel[(x.numel() // 1024,)](x, y, BLOCK=1024)
        return y
"""


def test_slots_behind_a_server_outlive_the_fault_of_one_program(locks: Path) -> None:
    own_settings = MeasurementSettings(
        Settings(), Contract(), torch.device("cuda"), locks, trust="own"
    )
    stream = generate_programs(_CHAIN, "cuda", WIDTH)
    requests = [next(stream) for _ in range(12)]
    requests.insert(5, program("faulty", FAULTY))
    with JudgeEvaluator(own_settings, slots=3) as evaluator:
        first = evaluator.measure(TASK, requests[:3])
        if not evaluator.served:
            pytest.skip("this machine has no MPS server")
        results = {
            result.program: result for result in [*first, *evaluator.measure(TASK, requests[3:])]
        }
        assert evaluator._slot_pool is not None
        assert evaluator._slot_pool.faults == 1, results["faulty"]
    assert results.pop("faulty").outcome == "run"
    for name, result in results.items():
        wrong = int(name.rpartition(" ")[2]) % 4 == 3
        assert result.outcome in (("wrong",) if wrong else ("ok", "unstable")), (
            result
        )  # others may use this GPU


def test_a_server_ends_with_its_evaluator() -> None:
    server = mps.start(torch.device("cuda"))
    if server is None:
        pytest.skip("this machine has no MPS server")
    (number,) = server.ask_daemon("get_server_list").split()
    server.close()
    assert server._daemon.poll() is not None
    assert not server._folder.exists()
    state = Path(f"/proc/{number}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
