"""A published source becomes data in a child, fitted to its reference's region; what cannot says
why, attacks stay there.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adversarial.fork_server import fork_children
from tests.ingest.published_sources import REFERENCE, RESULT, write_candidate
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.cuda.cubin import inspect_cubin
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ingest.published import lower_source
from torch_cudal1.ingest.published.lower_source import (
    CapturedReference,
    capture_reference,
    fit_to_reference,
    lower_candidate,
)
from torch_cudal1.ir.aten import is_functional
from torch_cudal1.ir.program import Aten, Call, Program
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.checks.static.allowed_operators import is_allowed
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluationConfig
from torch_cudal1.judge.wire.channel import save_tensors
from torch_cudal1.runtime.executor import prepare

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def job() -> SourceEvaluationConfig:
    return SourceEvaluationConfig(
        Settings(candidate_timeout_s=20.0), Contract(), CPU, gradients=False, trust="foreign"
    )


@pytest.fixture(scope="module")
def reference(job: SourceEvaluationConfig) -> Iterator[CapturedReference]:
    with fork_children():
        captured = capture_reference(REFERENCE, job)
        assert isinstance(captured, CapturedReference)
        yield captured


def program_of(text: str, reference: CapturedReference, job: SourceEvaluationConfig) -> Program:
    program = lower_candidate(text, "ModelNew", reference, job)
    assert isinstance(program, Program), program
    return program


def module() -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """The reference's module as its user has it."""
    space: dict[str, Any] = {}
    exec(REFERENCE, space)
    return space["Model"](16).eval(), space["get_inputs"]()


def test_the_references_region_is_the_one_that_accelerate_looks_up(
    reference: CapturedReference,
) -> None:
    model, inputs = module()
    with torch.no_grad():
        (region,) = capture_regions(model, tuple(inputs))
    assert region.key == reference.region.key
    assert region.roles == reference.region.roles


def test_parameters_are_matched_by_name_in_whatever_order_they_are_held(
    reference: CapturedReference, job: SourceEvaluationConfig
) -> None:
    program = program_of(write_candidate(), reference, job)
    inputs = reference.inputs()
    assert inputs is not None
    (expected,), (result,) = (
        prepare(reference.region.program, CPU)(inputs),
        prepare(program, CPU)(inputs),
    )
    torch.testing.assert_close(result, expected)
    assert program.inputs == reference.region.program.inputs


def test_results_that_are_written_into_fresh_memory_are_plain_results(
    reference: CapturedReference, job: SourceEvaluationConfig
) -> None:
    written = f"out = torch.empty(x.shape)\nout.copy_({RESULT.removeprefix('return ')})\nreturn out"
    assert program_of(write_candidate(written), reference, job) == program_of(
        write_candidate(), reference, job
    )


NOT_LOWERABLE = {
    "a branch on data": (
        write_candidate(f"if x.sum() > 0: return x\n{RESULT}"),
        "looks at the values of tensors",
    ),
    "state in Python": (
        write_candidate(f"self.calls = getattr(self, 'calls', 0) + 1\n{RESULT}"),
        "changes the module itself",
    ),
    "an operator of its own": (
        write_candidate(
            "return torch.ops.stranger.op(x) * self.scale + self.shift",
            top='lib = torch.library.Library("stranger", "DEF")\nlib.define("op(Tensor x) -> Tensor")\n'
            'lib.impl("op", lambda x: x.relu(), "CPU")\n'
            'torch.library.register_fake("stranger::op", lambda x: torch.empty_like(x), lib=lib)',
        ),
        "belongs to another library",
    ),
    "a compiled extension": (
        write_candidate(
            top="from torch.utils.cpp_extension import load_inline", init="load_inline('x')"
        ),
        "builds an extension of its own (load_inline, line 9)",
    ),
    "parameters of other names": (
        write_candidate(init="self.more = torch.nn.Parameter(torch.ones(width))"),
        "state_dict",
    ),
    "a buffer that is not in the state": (
        write_candidate(
            "return x * self.own",
            init="self.register_buffer('own', torch.ones(width), persistent=False)",
        ),
        "reads 'own', which the reference's graph does not",
    ),
    "a write to its input": (
        write_candidate("x.sub_(y)\nreturn torch.relu(x)"),
        "writes to argument 1, the reference's to nothing",
    ),
    "a random number": (
        write_candidate("import random\nreturn x * random.random()"),
        "Python's random module",
    ),
    "an early end": (write_candidate("import os\nos._exit(0)"), "exited with status 0"),
    "an endless loop": (write_candidate("while True: pass"), "deadline"),
}


@pytest.mark.parametrize("name", NOT_LOWERABLE)
def test_what_has_no_data_form_says_why(
    name: str, reference: CapturedReference, job: SourceEvaluationConfig
) -> None:
    text, word = NOT_LOWERABLE[name]
    short = (
        replace(job, settings=replace(job.settings, candidate_timeout_s=3.0))
        if name == "an endless loop"
        else job
    )
    refusal = lower_candidate(text, "ModelNew", reference, short)
    assert isinstance(refusal, Refusal), refusal
    assert word in refusal.reason, refusal.reason


def test_a_source_that_writes_files_or_calls_out_while_it_is_lowered_stays_in_the_sandbox(
    tmp_path: Path, reference: CapturedReference, job: SourceEvaluationConfig
) -> None:
    tmp_path.chmod(0o777)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    victim.chmod(0o666)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        acts = (
            f"open({str(victim)!r}, 'w').write('theirs')",
            f"open({str(tmp_path / 'new')!r}, 'w').write('theirs')",
            f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1).sendall(b'hello')",
        )
        answers = [
            lower_candidate(write_candidate(f"{act}\n{RESULT}"), "ModelNew", reference, job)
            for act in acts
        ]
        quietly = "\n".join(f"try:\n    {act}\nexcept OSError: pass" for act in acts)
        kept_on = lower_candidate(
            write_candidate(f"{quietly}\n{RESULT}"), "ModelNew", reference, job
        )
        with pytest.raises(TimeoutError):
            server.accept()
    assert all(isinstance(answer, Refusal) for answer in answers), (
        answers
    )  # no such file, or no permission, as the level has it
    assert isinstance(kept_on, Program)  # refused acts that it shrugs off cost it nothing
    assert (victim.read_text(), (tmp_path / "new").exists()) == ("mine", False)


class _Liar:
    """A child that answers what it likes."""

    def __init__(self, folder: Path, answer: Mapping[str, Any]) -> None:
        self._folder, self._answer, self._files = folder, answer, 0

    def reserve_file(self) -> Path:
        self._files += 1
        return self._folder / f"{self._files}.safetensors"

    def call(self, verb: str, **fields: Any) -> Mapping[str, Any]:
        return self._answer


def honest(program: Program, folder: Path) -> dict[str, Any]:
    """The answer of a child that says the truth."""
    empty = folder / "empty.safetensors"
    payloads = [[], save_tensors([], empty), str(empty)]
    parts = {
        "sources": [0, 1, "scale", "shift"],
        "roles": ["input", "input", "parameter", "parameter"],
    }
    return {
        "program": program.to_json(),
        "payloads": payloads,
        **parts,
        "same": {},
        "writes": [],
        "name": "x",
    }


def nest_programs(depth: int) -> dict[str, Any]:
    """A Program in a Program in a Program."""
    content: dict[str, Any] = Program((), (), ()).to_json()
    for _ in range(depth):
        content = {**content, "steps": [{"op": "call", "program": content, "args": [], "outs": []}]}
    return content


LIES = {
    "Programs without end": {"program": nest_programs(100_000)},
    "not a program": {"program": {"format": 99}},
    "no program": {"program": None},
    "too few sources": {"sources": [0]},
    "sources of no kind": {"sources": [0, 1, "scale", {"a": 1}]},
    "a role of no kind": {"roles": ["input", "input", "parameter", "owner"]},
    "sources that do not exist": {"sources": [0, 1, "scale", 77]},
    "inputs changed for each other": {"sources": ["scale", 1, 0, "shift"]},
    "payloads elsewhere": {"payloads": [["a"], [["uint8", [4], [1]]], "/etc/passwd"]},
    "no names": {"same": None},
}


@pytest.mark.parametrize("name", LIES)
def test_an_answer_that_is_none_is_a_reason_and_nothing_else(
    name: str, tmp_path: Path, reference: CapturedReference
) -> None:
    ordered = [reference.sources.index(source) for source in (0, 1, "scale", "shift")]
    assert ordered == [0, 1, 2, 3]  # what `honest` says is the truth
    answer = {**honest(reference.region.program, tmp_path), **LIES[name]}
    path = tmp_path / "none.safetensors"
    try:
        traced: Any = lower_source._read(answer, path)
    except lower_source.MISREAD:
        return
    assert isinstance(
        fit_to_reference(traced.program, traced.sources, traced.writes, reference), Refusal
    )


def test_the_truth_is_taken(tmp_path: Path, reference: CapturedReference) -> None:
    answer = honest(reference.region.program, tmp_path)
    traced = lower_source._read(answer, Path(answer["payloads"][2]))
    assert (
        fit_to_reference(traced.program, traced.sources, traced.writes, reference)
        == reference.region.program
    )


def test_a_parameter_that_the_reference_holds_under_two_names_is_one_input(
    reference: CapturedReference,
) -> None:
    tied = replace(reference, same={"offset": "shift"})
    sources = (0, 1, "scale", "offset")
    assert fit_to_reference(reference.region.program, sources, (), tied) == reference.region.program
    assert isinstance(fit_to_reference(reference.region.program, sources, (), reference), Refusal)


def test_a_reference_that_would_have_this_process_open_a_file_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    job: SourceEvaluationConfig,
    reference: CapturedReference,
) -> None:
    """`aten.from_file` writes to nothing by its schema, and with shared=True it makes the file."""
    target = tmp_path / "made"
    step = Aten("aten.from_file.default", (str(target), True, 8), (), (0,))
    program = Program((), (step,), (0,))
    answer = {**honest(program, tmp_path), "sources": [], "roles": []}
    answer["program"] = program.to_json()
    liar = _Liar(tmp_path, answer)

    class Subject:
        form = reference.form

    monkeypatch.setattr(lower_source, "_start_child", lambda job: _enter(liar))
    monkeypatch.setattr(
        lower_source, "read_reference", lambda *_: (Subject, list(reference.examples))
    )
    monkeypatch.setattr(lower_source, "read_program", lambda *_: program)
    refusal = capture_reference(REFERENCE, job)
    assert isinstance(refusal, Refusal)
    assert "aten.from_file.default" in refusal.reason
    assert not target.exists()


@pytest.mark.parametrize("target", sorted(lower_source.ALSO_IN_REFERENCES))
def test_what_references_may_also_say_exists_and_writes_to_nothing(target: str) -> None:
    assert is_functional(target)
    assert not is_allowed(target)  # else it need not be on this list


@contextmanager
def _enter(child: Any) -> Iterator[Any]:
    yield child


TRITON = """
import triton
import triton.language as tl
from torch_cudal1.ingest.published import launches

launches.find_sm = lambda device: 90  # compile as on a GPU; nothing here could run it

@triton.jit
def kernel(x, y, scale, shift, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = at % BLOCK
    found = tl.maximum(tl.load(x + at) - tl.load(y + at), 0.0) * tl.load(scale + column) + tl.load(shift + column)
    tl.store(out + at, found)
"""


def test_a_triton_kernel_is_compiled_inside_the_sandbox(
    reference: CapturedReference, job: SourceEvaluationConfig
) -> None:
    pytest.importorskip("triton")
    body = "out = torch.empty_like(x)\nkernel[(8,)](x, y, self.scale, self.shift, out, BLOCK=16)\nreturn out"
    program = program_of(write_candidate(body, top=TRITON), reference, job)
    (call,) = program.steps
    assert isinstance(call, Call)
    assert program.launches
    assert [reference.sources[place] for place in call.args] == [0, 1, "scale", "shift"]
    (payload,) = call.program.payloads.values()
    assert inspect_cubin(bytes(payload.tolist())).sm == 90
