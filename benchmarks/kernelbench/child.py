"""One task in a process of its own: prepare, tune, measure all columns in turn, check the answers
again, and tell the row.

Whatever a column does is that column's result. What this process itself cannot survive (a crash, a
hang, no memory) is seen from outside, by `crew`. Memory that is only needed for compiling is given
back before the task queues for what measuring takes.
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
from benchmarks.kernelbench.baselines import STARTS, Call, gross_error, tensors_of
from benchmarks.kernelbench.job import COMPILE, EAGER, GRAPH, OURS, RELEASE, Job, grant
from benchmarks.kernelbench.line import Line
from benchmarks.kernelbench.loading import (
    Demand,
    Made,
    demand,
    import_source,
    make_inputs,
    make_module,
    tensor_bytes,
)
from benchmarks.kernelbench.measuring import Measured, against, floor_us, measure
from benchmarks.kernelbench.processes import WHERE, die_with_parent
from torch_cudal1.device.gpu_lock import lock_seconds, lock_uses
from torch_cudal1.judge import pool_scope

__all__ = ["Bench", "main"]

# Times what a call takes: for compiling beside a process of the judge's that starts; for a search
# with its judge and all columns side by side (33 seen on an H200 for 0.3 GiB, fewer the larger a
# call is). Of a large one both processes have three sets of what it is given and two of its
# results, one has both in float64 too, and what lies between.
_COMPILING, _MEASURING = 3.0, 30.0
_GIVEN, _MADE, _BETWEEN = 10, 6, 3
_CONTEXTS_BYTES, _STORED_BYTES = (
    3 << 30,
    8 << 30,
)  # of the processes of a task; what the judge keeps of earlier results at most
_WAITING_BYTES = (
    3 << 29
)  # of the task's process and one of the judge's, which has been given nothing yet
_LARGE_BYTES = (
    4 << 30
)  # a call of this size is not recorded into a CUDA graph before it must be: the graph keeps its memory
_RING, _RING_BYTES = 4, 2 << 30
_WARM_CALLS = 3


@dataclass
class Bench:
    """A task's state: its module, the columns that run so far, and everything that goes into the
    row.
    """

    made: Made
    job: Job
    line: Line
    spec: Mapping[str, Any]
    module: nn.Module | None = None
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    ours: dict[str, dict[str, Any]] = field(default_factory=dict)
    stages_s: dict[str, float] = field(default_factory=dict)
    shared_bytes: int = 0  # of the GPU, with a process of the judge's
    helpers: ExitStack = field(
        default_factory=ExitStack
    )  # processes of the judge, while there is something to search

    @property
    def device(self) -> torch.device:
        """Where everything runs."""
        return torch.device(self.job.device)

    @property
    def own(self) -> list[str]:
        """The package's columns, arms included."""
        return [name for name in self.job.contenders if name != RELEASE]

    @contextmanager
    def stage(self, name: str, column: str = "") -> Iterator[None]:
        """Tell what is being done, for one column or for all, and remember how long it took."""
        self.line.stage(name, column)
        begin = time.monotonic()
        try:
            yield
        finally:
            self.stages_s[name] = round(self.stages_s.get(name, 0.0) + time.monotonic() - begin, 3)

    def attempt(self, name: str, action: Callable[[], Any]) -> Any:
        """Run one column's action; what it raises is the column's failure, and the column runs no
        more.
        """
        try:
            return action()
        except Exception as error:  # noqa: BLE001  whatever a column raises is its result
            self.fail(name, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
            return None

    def fail(self, name: str, reason: str, status: str = "failed") -> None:
        """The column has no time."""
        self.columns[name] = {**self.columns.get(name, {}), "status": status, "reason": reason}
        self.calls.pop(name, None)


def main(argv: list[str] | None = None) -> int:
    """Measure the task of the specification; 0 when a row was told."""
    parser = argparse.ArgumentParser(prog="benchmarks.kernelbench.child")
    parser.add_argument("--line", type=int, required=True)
    parser.add_argument("--spec", type=Path, required=True)
    args = parser.parse_args(argv)
    die_with_parent()
    faulthandler.enable()  # a task's log says where its process crashed,
    faulthandler.register(WHERE, all_threads=False)  # and where it was when its time was up
    spec = json.loads(args.spec.read_text(encoding="utf-8"))
    job, line = Job.from_json(spec["job"]), Line(Connection(args.line))
    grant(job.rights)
    torch.set_num_threads(max(1, int(spec["threads"])))
    line.stage("load")
    made = import_source(args.spec.with_suffix(".py"))
    bench = Bench(made, job, line, spec)
    needs = demand(made, job.mode)
    with torch.no_grad(), bench.helpers:
        _prepare(bench, None if needs is None else needs.memory_bytes)
        row = _measured(bench, needs)
    line.row(
        row
        | {
            "demand": None
            if needs is None
            else {**vars(needs), "floor_us": floor_us(needs, bench.device)}
        }
    )
    return 0


def _prepare(bench: Bench, size: int | None) -> None:
    """Compile the baselines, beside other tasks; the memory of it is given back. Meanwhile a
    process of the judge starts.
    """
    bench.line.memory(None if size is None else int(_COMPILING * size))
    if bench.own:
        bench.helpers.enter_context(pool_scope())
        # a larger one would share more memory than a task may have before its turn
        shared = size if size is not None and size < _LARGE_BYTES else 0
        bench.shared_bytes = contenders.begin(bench.job, Path(bench.spec["cache"]), shared)
    with bench.stage("compile"):
        module = make_module(bench.made, bench.device, bench.job.mode)
        inputs = make_inputs(bench.made, bench.device, 0)
        for name in bench.job.baselines:
            if name == GRAPH:
                continue  # it compiles nothing and would keep its memory
            bench.calls[name] = STARTS[name](module, inputs)
            if name in (EAGER, COMPILE) or (size is not None and size < _LARGE_BYTES):
                bench.attempt(name, functools.partial(bench.calls[name], *inputs))
    bench.module = module
    del inputs
    _collect(bench.device)


def _measured(bench: Bench, needs: Demand | None) -> dict[str, Any]:
    """Everything from the second grant of memory on: the row."""
    contexts = _CONTEXTS_BYTES if bench.device.type == "cuda" else 0
    bench.line.memory(None if needs is None else contexts + _for_search(needs), _kept(bench))
    module = bench.module
    assert module is not None
    inputs = make_inputs(bench.made, bench.device, 0)
    _tune(bench, module, inputs)
    bench.helpers.close()
    paired = _judge(bench)
    _warm(bench, module, inputs)
    with bench.stage("measure"):
        ring = _ring(bench, inputs)
        found = measure(bench.calls, ring, bench.job, bench.line, bench.fail)
    del ring
    _check(bench, module)
    return _row(bench, found, paired)


def _for_search(needs: Demand) -> int:
    """Bytes that a search, its judge and all columns take, contexts left out."""
    between = max(0, needs.memory_bytes - needs.least_bytes)
    large = _GIVEN * needs.given_bytes + _MADE * needs.made_bytes + _BETWEEN * between
    return int(min(_MEASURING * needs.memory_bytes, _STORED_BYTES + large))


def _kept(bench: Bench) -> int:
    """Bytes of the GPU that a task has while it waits: contexts, parameters, and what is shared
    with the judge's process.
    """
    if bench.device.type != "cuda":
        return 0
    return _WAITING_BYTES + torch.cuda.memory_reserved(bench.device) + bench.shared_bytes


def _tune(bench: Bench, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """The package's columns: searched, then checked on inputs that the search did not see."""
    base = Path(bench.spec["cache"])
    for name in bench.own:
        if EAGER not in bench.calls:
            bench.fail(name, "eager cannot run this task")
            continue
        cache = base if name == OURS else base / "arms" / name.replace(" ", "-")
        say = functools.partial(_say, bench, name)
        with bench.stage("tune" if name == OURS else name, name):
            found = bench.attempt(
                name,
                functools.partial(contenders.tuned, name, module, inputs, bench.job, cache, say),
            )
        if found is not None:
            bench.ours[name], bench.calls[name] = dict(found.facts), found.call
        _collect(bench.device)
    _check(bench, module)


def _say(bench: Bench, column: str, what: str, fraction: float | None) -> None:
    """Progress of a search, which is what a failure names when the process has to be ended."""
    bench.line.stage(f"tune: {what}", column)


def _check(bench: Bench, module: nn.Module) -> None:
    """Are the package's columns right; a wrong one is not timed, or its times do not count.

    The reference is made anew each time: nothing of it takes memory while a search or a measurement
    runs.
    """
    names = [name for name in bench.own if name in bench.calls]
    if not names:
        return
    with bench.stage("verify"):
        try:
            wanted = verify.expected(module, make_inputs(bench.made, bench.device, 1))
        except Exception as error:  # noqa: BLE001  eager cannot do it: no answer of a column can be called right
            for name in names:
                bench.fail(
                    name,
                    f"no reference: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
                )
            return
        for name in names:
            _check_one(bench, name, wanted)
    _collect(bench.device)


def _check_one(bench: Bench, name: str, wanted: verify.Expected) -> None:
    swapped = bool(bench.ours.get(name, {}).get("swapped", True))
    found = bench.attempt(name, lambda: verify.check(bench.calls[name], wanted, swapped=swapped))
    if found is None:
        return
    before = bench.columns.get(name, {}).get("checked")
    found = found if before is None else verify.Checked(**before).worse(found)
    bench.columns[name] = {**bench.columns.get(name, {}), "checked": vars(found)}
    if found.reason:
        bench.fail(name, found.reason, "wrong")


def _judge(bench: Bench) -> dict[str, Any] | None:
    """The release's candidate, if it is a column: the judge's word."""
    if not bench.job.judged:
        return None
    candidate = bench.spec.get("candidate")
    if candidate is None:
        bench.fail(RELEASE, "withdrawn by its authors, or not in the file", "withdrawn")
        return None
    with bench.stage("judge", RELEASE):
        found = contenders.judged(
            bench.spec["source"], candidate, bench.job, Path(bench.spec["cache"])
        )
    bench.columns[RELEASE] = {key: value for key, value in found.items() if key != "paired"}
    return found.get("paired")


def _warm(bench: Bench, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Record graphs, fill caches, and put baselines out of the race that do not compute what eager
    does.
    """
    with bench.stage("warm"):
        if GRAPH in bench.job.baselines and EAGER in bench.calls:
            found = bench.attempt(GRAPH, lambda: STARTS[GRAPH](module, inputs))
            if found is not None:
                bench.calls[GRAPH] = found
        eager = _called(bench, EAGER, inputs) if EAGER in bench.calls else None
        if eager is not None and gross_error(_called(bench, EAGER, inputs, seed=1) or {}, eager):
            # the task draws numbers itself, and a compiler may draw others: nothing to compare
            eager = None
        for name in [name for name in bench.calls if name != EAGER]:
            outputs = _called(bench, name, inputs)
            if (
                outputs is not None
                and eager is not None
                and name in bench.job.baselines
                and (reason := gross_error(outputs, eager))
            ):
                bench.fail(name, reason, "wrong")


def _called(
    bench: Bench, name: str, inputs: tuple[Any, ...], *, seed: int = 0
) -> dict[str, torch.Tensor] | None:
    def run() -> dict[str, torch.Tensor]:
        for _ in range(_WARM_CALLS - 1):
            bench.calls[name](*inputs)
        torch.manual_seed(seed)
        return tensors_of(bench.calls[name](*inputs))

    return bench.attempt(name, run)  # type: ignore[no-any-return]


def _ring(bench: Bench, inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Input sets that timed calls take in turn, as many as fit."""
    sets = max(1, min(_RING, _RING_BYTES // max(1, tensor_bytes(inputs))))
    return [
        inputs,
        *(make_inputs(bench.made, bench.device, 100 + number) for number in range(sets - 1)),
    ]


def _row(bench: Bench, found: Measured, paired: dict[str, Any] | None) -> dict[str, Any]:
    columns = {
        name: {"status": "ok", "reason": "", **column} for name, column in bench.columns.items()
    }
    for name, times in found.times.items():
        columns[name] = {"status": "ok", "reason": "", **columns.get(name, {}), **times}
    best, ratios = against(found, bench.job, columns, paired)
    return {
        "schema": report.SCHEMA,
        "kind": "kernelbench",
        "columns": columns,
        "best": best,
        "against": ratios,
        "ours": bench.ours.get(OURS, {}),
        "arms": {name: facts for name, facts in bench.ours.items() if name != OURS},
        "stages_s": bench.stages_s,
        "state": dict(found.state),
        "gpu_s": dict(zip(("waited", "held"), lock_seconds(), strict=True)) | {"for": lock_uses()},
        "peak_bytes": torch.cuda.max_memory_allocated(bench.device)
        if bench.device.type == "cuda"
        else None,
    }


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
