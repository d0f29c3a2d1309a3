"""A prepared benchmark whose measurements are written down, for tests that must not depend on how
quiet this machine is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.benchmark.candidate_timing import BenchmarkResult
from torch_cudal1.judge.benchmark.quick import PreparedBenchmark


class ScriptedBenchmark(PreparedBenchmark):
    """A benchmark that answers what `run` says; `examined`: its checks beside other benchmarks."""

    def __init__(
        self,
        run: Callable[[], BenchmarkResult],
        examined: Callable[[BenchmarkResult], BenchmarkResult] | None = None,
    ) -> None:
        self._run, self._examined = run, examined

    @property
    def has_concurrent_checks(self) -> bool:
        return self._examined is not None

    def measure(self) -> BenchmarkResult:
        return self._run()

    def run_concurrent_checks(self, timed: BenchmarkResult) -> BenchmarkResult:
        assert self._examined is not None
        return self._examined(timed)

    def recheck_clocks(self, timed: BenchmarkResult) -> BenchmarkResult:
        return replace(timed, checks=(*timed.checks[:-1], CheckResult("wall_slope", True)))
