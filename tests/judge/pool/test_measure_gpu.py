"""The evaluator on a GPU: what it rewards repeats, what cheats there is refused, and lanes share
the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.bench_evaluator import _CHAIN, _REFERENCE, programs
from tests.training.sources import program
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.pool import mps
from torch_cudal1.judge.pool.evaluator import JudgeEvaluator
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
def terms(locks: Path) -> MeasurementSettings:
    return MeasurementSettings(Settings(), Contract(), torch.device("cuda"), locks)


@pytest.fixture(scope="module")
def evaluator(terms: MeasurementSettings) -> Iterator[JudgeEvaluator]:
    with JudgeEvaluator(terms, lanes=2) as made:
        yield made


def test_right_triton_programs_have_scores_and_wrong_ones_have_none(
    evaluator: JudgeEvaluator,
) -> None:
    stream = programs(_CHAIN, "cuda", WIDTH)
    asked = [next(stream) for _ in range(8)]
    found = evaluator.measure(TASK, asked)
    for index, one in enumerate(found):
        assert one.outcome in (("wrong",) if index % 4 == 3 else ("ok", "unstable")), (
            one
        )  # others may use this GPU
        assert one.score is None or one.score > 1.0


def test_the_same_program_measured_again_has_about_the_same_score_or_none(
    evaluator: JudgeEvaluator,
) -> None:
    """A stranger's program is timed on the wall: on a busy host it may have no score, and Python's
    launches are in it.
    """
    asked = next(programs(_CHAIN, "cuda", WIDTH))
    twins = [program(f"twin {index}", asked.source + f"\n# {index}\n") for index in range(4)]
    found = evaluator.measure(TASK, twins)
    assert {one.outcome for one in found} <= {"ok", "unstable"}, found
    logs = [math.log(one.score) for one in found if one.score is not None]
    assert len(logs) >= 2, [(one.outcome, one.detail) for one in found]
    assert max(logs) - min(logs) < 0.25


@pytest.mark.parametrize("text", [SIDE_STREAM, REPLAYED], ids=["side stream", "replayed"])
def test_cheats_of_a_gpu_are_refused(evaluator: JudgeEvaluator, text: str) -> None:
    (found,) = evaluator.measure(TASK, [program("cheat " + text, text)])
    assert found.outcome in ("hack", "wrong", "run"), found


def test_the_naive_clock_does_not_see_another_stream(terms: MeasurementSettings) -> None:
    cheats = [program(f"p{index}", f"{SIDE_STREAM}# {index}\n") for index in range(3)]
    with NaiveEvaluator(terms) as naive:
        found = naive.measure(TASK, cheats)
    fooled = [
        one for one in found if one.outcome in ("ok", "unstable")
    ]  # right, as far as it looks; a busy GPU is late at times
    assert fooled, found
    assert all(one.score is None or one.score > 2 for one in fooled)


def test_programs_of_templates_share_processes(locks: Path) -> None:
    own = MeasurementSettings(Settings(), Contract(), torch.device("cuda"), locks, trust="own")
    stream = programs(_CHAIN, "cuda", WIDTH)
    with JudgeEvaluator(own) as evaluator:
        found = evaluator.measure(TASK, [next(stream) for _ in range(6)])
        assert [one.outcome for one in found].count("wrong") == 1, found
        assert evaluator._lane is not None
        assert evaluator._lane._processes.kept is not None
        assert evaluator._lane._processes.loans >= 3, (
            "after the fifth program one process had served most of them"
        )


def test_a_slow_host_is_not_in_the_score_of_a_program_of_ours(locks: Path) -> None:
    own = MeasurementSettings(Settings(), Contract(), torch.device("cuda"), locks, trust="own")
    text = next(programs(_CHAIN, "cuda", WIDTH)).source
    forward = "def forward(self, given):\n"
    slow = "import time\n" + text.replace(forward, f"{forward}        time.sleep(2e-4)\n")
    assert slow.count("time.") == 1, slow
    with JudgeEvaluator(own) as evaluator:
        scores = [
            one.score
            for one in evaluator.measure(TASK, [program("plain", text), program("slow", slow)])
        ]
    assert None not in scores
    assert max(filter(None, scores)) < 1.05 * min(filter(None, scores)), scores


@pytest.mark.parametrize("text", [SIDE_STREAM, REPLAYED], ids=["side stream", "replayed"])
def test_cheats_among_programs_of_ours_are_refused_too(locks: Path, text: str) -> None:
    own = MeasurementSettings(Settings(), Contract(), torch.device("cuda"), locks, trust="own")
    with JudgeEvaluator(own) as evaluator:
        (found,) = evaluator.measure(TASK, [program("cheat", text)])
    assert found.outcome in ("hack", "wrong", "run"), found


def test_what_a_program_of_ours_computed_is_in_no_memory_that_the_next_one_gets(
    locks: Path,
) -> None:
    own = MeasurementSettings(Settings(), Contract(), torch.device("cuda"), locks, trust="own")
    left = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return torch.empty_like(x)\n"
    with JudgeEvaluator(own) as evaluator:
        (right,) = evaluator.measure(TASK, [next(programs(_CHAIN, "cuda", WIDTH))])
        (found,) = evaluator.measure(TASK, [program("left", left)])
        lane = evaluator._lane
        assert right.outcome == "ok", right
        assert found.outcome == "wrong", found
        assert "NaN or infinity differs" in found.detail, (
            "its memory held no result of the program before"
        )
        assert lane is not None
        assert lane._processes.kept is not None
        kept_bytes = [lane._processes.kept.call("usage")["usage"]["gpu_used_bytes"]]
        lane._processes.empty()
        assert lane._processes.kept is not None
        kept_bytes.append(lane._processes.kept.call("usage")["usage"]["gpu_used_bytes"])
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


def test_lanes_behind_a_server_outlive_the_fault_of_one_program(locks: Path) -> None:
    own = MeasurementSettings(Settings(), Contract(), torch.device("cuda"), locks, trust="own")
    stream = programs(_CHAIN, "cuda", WIDTH)
    asked = [next(stream) for _ in range(12)]
    asked.insert(5, program("faulty", FAULTY))
    with JudgeEvaluator(own, lanes=3) as evaluator:
        first = evaluator.measure(TASK, asked[:3])
        if not evaluator.served:
            pytest.skip("this machine has no MPS server")
        found = {one.program: one for one in [*first, *evaluator.measure(TASK, asked[3:])]}
        assert evaluator._lanes is not None
        assert evaluator._lanes.faults == 1, found["faulty"]
    assert found.pop("faulty").outcome == "run"
    for name, one in found.items():
        wrong = int(name.rpartition(" ")[2]) % 4 == 3
        assert one.outcome in (("wrong",) if wrong else ("ok", "unstable")), (
            one
        )  # others may use this GPU


def test_a_server_ends_with_its_evaluator() -> None:
    server = mps.start(torch.device("cuda"))
    if server is None:
        pytest.skip("this machine has no MPS server")
    (number,) = server.told("get_server_list").split()
    server.close()
    assert server._daemon.poll() is not None
    assert not server._folder.exists()
    state = Path(f"/proc/{number}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
