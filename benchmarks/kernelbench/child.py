"""One task in a process of its own: prepare, tune, measure all columns in turn, check the answers
again, and send the row.

Whatever a column does is that column's result. What this process itself cannot survive (a crash, a
hang, no memory) is seen from outside, by `task_pool`. Memory that is only needed for compiling is
released before the task queues for what measuring takes.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import report
from benchmarks.kernelbench import contenders, verify
from benchmarks.kernelbench.baselines import STARTS, Call, copy_tensors, find_gross_error
from benchmarks.kernelbench.job import (
    COMPILE,
    EAGER,
    GRAPH,
    OURS,
    RELEASE,
    Job,
    get_dtype,
    set_precision,
)
from benchmarks.kernelbench.loading import (
    Demand,
    TaskSource,
    estimate_demand,
    import_source,
    make_inputs,
    make_module,
    tensor_bytes,
)
from benchmarks.kernelbench.measuring import (
    Measured,
    compute_lower_bound_us,
    compute_ratios,
    measure_columns,
)
from benchmarks.kernelbench.processes import STACK_SIGNAL, die_with_parent
from benchmarks.kernelbench.task_channel import TaskChannel
from torch_cudal1.device.gpu_lock import lock_seconds, lock_uses
from torch_cudal1.judge import pool_scope

__all__ = ["Bench", "main"]

# Memory as a multiple of what one call takes: for compiling while a process of the judge starts;
# for a search with its judge and all columns (33 seen on an H200 for a call of 0.3 GiB, less the
# larger a call is). Of a large call both processes hold three sets of inputs and two of results,
# one of them holds both in float64 too, and the intermediate results.
_COMPILING_FACTOR, _MEASURING_FACTOR = 3.0, 30.0
_INPUT_COPIES, _RESULT_COPIES, _INTERMEDIATE_COPIES = 10, 6, 3
# CUDA contexts of the processes of a task; earlier results that the judge keeps at most
_CONTEXTS_BYTES, _STORED_BYTES = 3 << 30, 8 << 30
# contexts of the task's process and of one of the judge's that holds no tensors yet
_WAITING_BYTES = 3 << 29
# a call of this size is recorded into a CUDA graph as late as possible: the graph keeps its memory
_LARGE_BYTES = 4 << 30
_INPUT_SETS, _INPUT_SETS_BYTES = 4, 2 << 30
_WARM_CALLS = 3


@dataclass
class Bench:
    """A task's state: its module, the columns that run so far, and everything that goes into the
    row.
    """

    source: TaskSource
    job: Job
    line: TaskChannel
    spec: Mapping[str, Any]
    module: nn.Module | None = None
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    package_facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    stages_s: dict[str, float] = field(default_factory=dict)
    shared_bytes: int = 0  # of the GPU, with a process of the judge's
    # processes of the judge, while there is something to search
    helpers: ExitStack = field(default_factory=ExitStack)

    @property
    def device(self) -> torch.device:
        """The device that everything runs on."""
        return torch.device(self.job.device)

    @property
    def package_columns(self) -> list[str]:
        """The package's columns, arms included."""
        return [name for name in self.job.contenders if name != RELEASE]

    @contextmanager
    def stage(self, name: str, column: str = "") -> Iterator[None]:
        """Send what is being done, for one column or for all, and remember how long it took."""
        self.line.stage(name, column)
        begin = time.monotonic()
        try:
            yield
        finally:
            self.stages_s[name] = round(self.stages_s.get(name, 0.0) + time.monotonic() - begin, 3)

    def attempt(self, name: str, action: Callable[[], Any]) -> Any:
        """Run one action of a column; an exception is the failure of the column, which then runs no
        more.
        """
        try:
            return action()
        except Exception as error:  # noqa: BLE001  whatever a column raises is its result
            self.fail(name, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
            return None

    def fail(self, name: str, reason: str, status: str = "failed") -> None:
        """Mark a column as failed: it has no time."""
        self.columns[name] = {**self.columns.get(name, {}), "status": status, "reason": reason}
        self.calls.pop(name, None)


def main(argv: list[str] | None = None) -> int:
    """Measure the task of the specification; 0 when a row was sent."""
    parser = argparse.ArgumentParser(prog="benchmarks.kernelbench.child")
    parser.add_argument("--line", type=int, required=True)
    parser.add_argument("--spec", type=Path, required=True)
    args = parser.parse_args(argv)
    die_with_parent()
    faulthandler.enable()  # a task's log says where its process crashed,
    faulthandler.register(STACK_SIGNAL, all_threads=False)  # and where it was when its time was up
    spec = json.loads(args.spec.read_text(encoding="utf-8"))
    job, line = Job.from_json(spec["job"]), TaskChannel(Connection(args.line))
    set_precision(job.rights)
    torch.set_num_threads(max(1, int(spec["threads"])))
    line.stage("load")
    source = import_source(args.spec.with_suffix(".py"), get_dtype(job.rights))
    bench = Bench(source, job, line, spec)
    estimate = estimate_demand(source, job.mode)
    with torch.no_grad(), bench.helpers:
        _prepare(bench, None if estimate is None else estimate.memory_bytes)
        row = _measure_task(bench, estimate)
    line.row(
        row
        | {
            "demand": None
            if estimate is None
            else {**vars(estimate), "floor_us": compute_lower_bound_us(estimate, bench.device)}
        }
    )
    return 0


def _prepare(bench: Bench, memory_bytes: int | None) -> None:
    """Compile the baselines, beside other tasks, and release the memory. Meanwhile a process of the
    judge starts.
    """
    bench.line.memory(None if memory_bytes is None else int(_COMPILING_FACTOR * memory_bytes))
    if bench.package_columns:
        bench.helpers.enter_context(pool_scope())
        # a larger one would share more memory than a task may have before its turn
        shared = memory_bytes if memory_bytes is not None and memory_bytes < _LARGE_BYTES else 0
        bench.shared_bytes = contenders.prestart_judge(bench.job, Path(bench.spec["cache"]), shared)
    with bench.stage("compile"):
        module = make_module(bench.source, bench.device, bench.job.mode)
        inputs = make_inputs(bench.source, bench.device, 0)
        for name in bench.job.baselines:
            if name == GRAPH:
                continue  # it compiles nothing and would keep its memory
            bench.calls[name] = STARTS[name](module, inputs)
            if name in (EAGER, COMPILE) or (
                memory_bytes is not None and memory_bytes < _LARGE_BYTES
            ):
                bench.attempt(name, functools.partial(bench.calls[name], *inputs))
    bench.module = module
    del inputs
    _free_memory(bench.device)


def _measure_task(bench: Bench, estimate: Demand | None) -> dict[str, Any]:
    """The row: everything after the second grant of memory."""
    contexts = _CONTEXTS_BYTES if bench.device.type == "cuda" else 0
    bench.line.memory(
        None if estimate is None else contexts + _count_search_bytes(estimate),
        _count_waiting_bytes(bench),
    )
    module = bench.module
    assert module is not None
    inputs = make_inputs(bench.source, bench.device, 0)
    _tune(bench, module, inputs)
    bench.helpers.close()
    paired = _judge(bench)
    _warm(bench, module, inputs)
    with bench.stage("measure"):
        input_sets = _make_input_sets(bench, inputs)
        measured = measure_columns(bench.calls, input_sets, bench.job, bench.line, bench.fail)
    del input_sets
    _check(bench, module)
    return _make_row(bench, measured, paired)


def _count_search_bytes(estimate: Demand) -> int:
    """Bytes that a search, its judge and all columns take, contexts left out."""
    intermediate_bytes = max(0, estimate.memory_bytes - estimate.least_bytes)
    large_call_bytes = (
        _INPUT_COPIES * estimate.given_bytes
        + _RESULT_COPIES * estimate.result_bytes
        + _INTERMEDIATE_COPIES * intermediate_bytes
    )
    return int(min(_MEASURING_FACTOR * estimate.memory_bytes, _STORED_BYTES + large_call_bytes))


def _count_waiting_bytes(bench: Bench) -> int:
    """Bytes of the GPU that a task has while it waits: contexts, parameters, and what is shared
    with the judge's process.
    """
    if bench.device.type != "cuda":
        return 0
    return _WAITING_BYTES + torch.cuda.memory_reserved(bench.device) + bench.shared_bytes


def _tune(bench: Bench, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """The package's columns: searched, then checked on inputs that the search did not see."""
    cache_folder = Path(bench.spec["cache"])
    for name in bench.package_columns:
        if EAGER not in bench.calls:
            bench.fail(name, "eager cannot run this task")
            continue
        cache = cache_folder if name == OURS else cache_folder / "arms" / name.replace(" ", "-")
        report_progress = functools.partial(_report_progress, bench, name)
        with bench.stage("tune" if name == OURS else name, name):
            tuned = bench.attempt(
                name,
                functools.partial(
                    contenders.tune_module, name, module, inputs, bench.job, cache, report_progress
                ),
            )
        if tuned is not None:
            bench.package_facts[name], bench.calls[name] = dict(tuned.facts), tuned.call
        _free_memory(bench.device)
    _check(bench, module)


def _report_progress(bench: Bench, column: str, step: str, fraction: float | None) -> None:
    """Send the step of a search: a failure names it when the process has to be ended."""
    bench.line.stage(f"tune: {step}", column)


def _check(bench: Bench, module: nn.Module) -> None:
    """Compare the package's columns with the reference; a wrong one is not timed, or its times do
    not count.

    The reference is computed again each time: nothing of it takes memory while a search or a
    measurement runs.
    """
    names = [name for name in bench.package_columns if name in bench.calls]
    if not names:
        return
    with bench.stage("verify"):
        try:
            expected = verify.compute_expected(module, make_inputs(bench.source, bench.device, 1))
        except Exception as error:  # noqa: BLE001
            # eager cannot do it: no answer of a column can be called right
            for name in names:
                bench.fail(
                    name,
                    f"no reference: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
                )
            return
        for name in names:
            _check_one(bench, name, expected)
    _free_memory(bench.device)


def _check_one(bench: Bench, name: str, expected: verify.Expected) -> None:
    swapped = bool(bench.package_facts.get(name, {}).get("swapped", True))
    check = bench.attempt(
        name, lambda: verify.check_column(bench.calls[name], expected, swapped=swapped)
    )
    if check is None:
        return
    before = bench.columns.get(name, {}).get("checked")
    check = check if before is None else verify.CheckOutcome(**before).worse(check)
    bench.columns[name] = {**bench.columns.get(name, {}), "checked": vars(check)}
    if check.reason:
        bench.fail(name, check.reason, "wrong")


def _judge(bench: Bench) -> dict[str, Any] | None:
    """The release's candidate, if it is a column: the judge's verdict."""
    if not bench.job.judged:
        return None
    candidate = bench.spec.get("candidate")
    if candidate is None:
        bench.fail(RELEASE, "withdrawn by its authors, or not in the file", "withdrawn")
        return None
    with bench.stage("judge", RELEASE):
        judged = contenders.judge_candidate(
            bench.spec["source"], candidate, bench.job, Path(bench.spec["cache"])
        )
    bench.columns[RELEASE] = {key: value for key, value in judged.items() if key != "paired"}
    return judged.get("paired")


def _warm(bench: Bench, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Record graphs, fill caches, and fail the baselines that do not compute what eager does."""
    with bench.stage("warm"):
        if GRAPH in bench.job.baselines and EAGER in bench.calls:
            graph_call = bench.attempt(GRAPH, lambda: STARTS[GRAPH](module, inputs))
            if graph_call is not None:
                bench.calls[GRAPH] = graph_call
        eager = _call_column(bench, EAGER, inputs) if EAGER in bench.calls else None
        if eager is not None and find_gross_error(
            _call_column(bench, EAGER, inputs, seed=1) or {}, eager
        ):
            # the task draws numbers itself, and a compiler may draw others: nothing to compare
            eager = None
        for name in [name for name in bench.calls if name != EAGER]:
            outputs = _call_column(bench, name, inputs)
            if (
                outputs is not None
                and eager is not None
                and name in bench.job.baselines
                and (reason := find_gross_error(outputs, eager))
            ):
                bench.fail(name, reason, "wrong")


def _call_column(
    bench: Bench, name: str, inputs: tuple[Any, ...], *, seed: int = 0
) -> dict[str, torch.Tensor] | None:
    def run() -> dict[str, torch.Tensor]:
        for _ in range(_WARM_CALLS - 1):
            bench.calls[name](*inputs)
        torch.manual_seed(seed)
        return copy_tensors(bench.calls[name](*inputs))

    return bench.attempt(name, run)  # type: ignore[no-any-return]


def _make_input_sets(bench: Bench, inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Input sets that timed calls take in turn, as many as fit."""
    sets = max(1, min(_INPUT_SETS, _INPUT_SETS_BYTES // max(1, tensor_bytes(inputs))))
    return [
        inputs,
        *(make_inputs(bench.source, bench.device, 100 + number) for number in range(sets - 1)),
    ]


def _make_row(bench: Bench, measured: Measured, paired: dict[str, Any] | None) -> dict[str, Any]:
    columns = {
        name: {"status": "ok", "reason": "", **column} for name, column in bench.columns.items()
    }
    for name, times in measured.times.items():
        columns[name] = {"status": "ok", "reason": "", **columns.get(name, {}), **times}
    best, ratios = compute_ratios(measured, bench.job, columns, paired)
    return {
        "schema": report.SCHEMA,
        "kind": "kernelbench",
        "columns": columns,
        "best": best,
        "against": ratios,
        "ours": bench.package_facts.get(OURS, {}),
        "arms": {name: facts for name, facts in bench.package_facts.items() if name != OURS},
        "stages_s": bench.stages_s,
        "state": dict(measured.state),
        "gpu_s": dict(zip(("waited", "held"), lock_seconds(), strict=True)) | {"for": lock_uses()},
        "peak_bytes": torch.cuda.max_memory_allocated(bench.device)
        if bench.device.type == "cuda"
        else None,
    }


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
