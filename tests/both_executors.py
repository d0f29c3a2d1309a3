"""A pytest plugin: every Program that any test makes runs on both executors too, and they must
agree bit for bit.

    python -m pytest -p tests.both_executors [TEST...]

A Program is noted when it is made, nested ones and those of fixtures and of the package too, and
runs after its test, once for each digest, with drawn inputs; on a machine without a GPU on the CPU,
wherever it was made for. The summary says how many ran, and counts what could not by its reason:
what the static check refuses, which neither executor runs; launches where there is no GPU; values
of more than 256 MiB. A Program whose results the Python executor does not repeat is compared in
form only. A difference is an error of the test that made the Program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.runtime.executors import assert_same, draw_inputs, outcome
from torch_cudal1.core.errors import Cudal1Error
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.check import check_program
from torch_cudal1.ir.interpreter import interpret
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.value_specs import value_specs
from torch_cudal1.judge.reference.region_reference import _on_host
from torch_cudal1.runtime.compiled import compile_program
from torch_cudal1.runtime.executor import launch_through_driver

_MOST_BYTES = 1 << 28
_programs: list[Program] = []
_compared_digests: set[str] = set()
_counts: Counter[str] = Counter()
_HAS_GPU = torch.cuda.is_available()  # asked now: tests make PyTorch believe in GPUs


def pytest_configure(config: pytest.Config) -> None:
    """From now on every Program is noted."""
    if config.pluginmanager.hasplugin("xdist") and getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(_Sum())
    plain = Program.__init__

    def noting(self: Program, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        _programs.append(self)

    Program.__init__ = noting  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """After the test and its fixtures: what they made is compared, and let go of."""
    yield
    before = torch.get_rng_state()
    differences = [
        difference for program in list(_programs) if (difference := _difference(program))
    ]
    torch.set_rng_state(before)
    _programs.clear()  # with what the comparison itself made
    if differences:
        pytest.fail("\n".join(differences), pytrace=False)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands its counts to the process that sums them up."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["both_executors"] = dict(_counts)


class _Sum:
    """With several workers: the counts of each."""

    def pytest_testnodedown(self, node: Any) -> None:
        _counts.update(getattr(node, "workeroutput", {}).get("both_executors", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was compared and what was not."""
    terminalreporter.section("Programs on both executors")
    for kind, count in sorted(_counts.items()):
        terminalreporter.line(f"{count:6} {kind}")


def _difference(program: Program) -> str:
    """How the executors differ; "" if they agree, or cannot be compared."""
    try:
        digest = program.digest
        if digest in _compared_digests:
            return ""
        _compared_digests.add(digest)
        check_program(program)
        if not (_HAS_GPU or program.launches):
            program = _on_host(program)
    except (Cudal1Error, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        _counts[f"not run: refused by the check ({type(error).__name__})"] += 1
        return ""
    if program.launches and not _HAS_GPU:
        _counts["not run: launches need a GPU"] += 1
    elif _bytes(program) > _MOST_BYTES:
        _counts["not run: too large"] += 1
    else:
        kind, difference = _compare(program)
        _counts[kind] += 1
        return difference
    return ""


def _bytes(program: Program) -> int:
    try:
        specs = value_specs(program).values()
    except Exception:  # noqa: BLE001  what fails on fake tensors fails on both executors, which is compared
        specs = program.inputs  # type: ignore[assignment]
    return sum(spec.size_bytes for spec in specs)


def _compare(program: Program) -> tuple[str, str]:
    """What came of it, and how they differ."""
    device = torch.device(program.device, 0 if program.device == "cuda" else None)
    try:
        plan = compile_program(program, device)
        plain = interpret(program, device, launcher=launch_through_driver)
    except Cudal1Error as error:
        return f"not run: refused when it is loaded ({type(error).__name__})", ""
    if isinstance(plan, Refusal):
        return f"the Python executor alone: {plan.reason}", ""
    kinds = []
    for integer_bound in (2, 1):
        inputs = draw_inputs(program, device, integer_bound)
        expected, repeated, compiled = (
            outcome(plain, inputs),
            outcome(plain, inputs),
            outcome(plan, inputs),
        )
        try:
            kinds.append(_agreement(expected, repeated, compiled, inputs))
        except AssertionError as error:
            message = f"Program {program.digest[:12]}: the C++ executor gives {compiled!r}, the Python one {expected!r}; {error}"
            return "DIFFERENT", message
    return max(kinds), ""


def _agreement(expected: Any, repeated: Any, compiled: Any, inputs: list[torch.Tensor]) -> str:
    if isinstance(expected, type) or isinstance(compiled, type):
        assert compiled is expected, "one raises, or raises something else"
        return "agree"
    repeats = True
    try:
        assert_same(expected, repeated, inputs)
    except AssertionError:
        repeats = False
    assert_same(compiled, expected, inputs, values=repeats)
    return "agree" if repeats else "agree in form: the Python executor does not repeat itself"
