"""Programs of the language read back as they were written, render right modules, and break where
they are meant to.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ingest.llm.records import Exemplar
from torch_cudal1.judge.pool.measured import Decoded, TrainingTask
from torch_cudal1.training.ksl.codec import KslCodec
from torch_cudal1.training.ksl.grammar import HACKS, Device, KslProgram
from torch_cudal1.training.ksl.ops import DIMS, OPS, make_task, resolve_task
from torch_cudal1.training.ksl.sentence import format_score, parse_score, read_prompt, write_prompt
from torch_cudal1.training.ksl.spaces import SPACES, list_programs
from torch_cudal1.training.ksl.triton_flat import HEAD

# Ragged: no size is a multiple of any block.
RAGGED = {
    "chain": (70, 96),
    "row": (70, 300),
    "mm": (70, 48, 100),
    "diag": (70, 90),
    "scan": (70, 200),
    "pool": (3, 7, 66),
}
WRONG = {"acc=f16", "fuse=swapped", "axis=swapped", "epilogue=swapped", "carry=off"}
CPU = KslCodec("cpu")
DEVICES: tuple[Device, ...] = ("cpu", "cuda")


def task_for(name: str) -> TrainingTask:
    return make_task(name, RAGGED[OPS[name].kind])


def ran(text: str, entry: str, inputs: list[torch.Tensor]) -> torch.Tensor:
    """What a module of a source text answers; `torch.empty` gives NaN, so that what is not written
    shows.
    """
    found: dict[str, Any] = {}
    exec(compile(text, "<program>", "exec"), found)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        result: torch.Tensor = found[entry]()(*inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    return result


def inputs_of(task: TrainingTask) -> list[torch.Tensor]:
    found: dict[str, Any] = {}
    exec(compile(task.reference, "<reference>", "exec"), found)
    torch.manual_seed(0)
    return list(found["get_inputs"]())


def is_designed_wrong(program: KslProgram) -> bool:
    return bool(WRONG & set(program.text.split()))


@pytest.mark.parametrize("device", DEVICES)
def test_every_program_reads_back_as_it_was_written(device: Device) -> None:
    codec = KslCodec(device)
    for kind in DIMS:
        task = task_for(next(name for name, op in OPS.items() if op.kind == kind))
        listed = list_programs(device, kind)
        assert len({program.text for program in listed}) == len(listed)
        for program in listed:
            found = codec.parse(task, codec.completion(task, program.text))
            assert not isinstance(found, Refusal), found
            assert found[0] == program
            assert set(program.text.split()) <= set(codec.vocabulary)


@given(
    words=st.lists(st.sampled_from(CPU.vocabulary), max_size=14), name=st.sampled_from(sorted(OPS))
)
@settings(max_examples=300, deadline=None)
def test_any_words_are_a_program_of_the_space_or_undecodable(words: list[str], name: str) -> None:
    task = task_for(name)
    found = CPU.decode(task, " ".join(words))
    if isinstance(found, Refusal):
        assert found.reason
    else:
        assert found.program in {program.text for program in CPU.programs(task)}


@given(data=st.data(), device=st.sampled_from(DEVICES), name=st.sampled_from(sorted(OPS)))
@settings(max_examples=100, deadline=None)
def test_a_prompt_reads_back_with_its_exemplars(
    data: st.DataObject, device: Device, name: str
) -> None:
    task = task_for(name)
    drawn = data.draw(st.lists(st.sampled_from(list_programs(device, OPS[name].kind)), max_size=3))
    prompt = write_prompt(task, [Exemplar(program.text, 1.5) for program in drawn], device)
    assert set(prompt.split()) <= set(KslCodec(device).vocabulary)
    told = read_prompt(prompt)
    assert (told.device, told.kind, told.graph) == (device, OPS[name].kind, OPS[name].graph)
    assert [program for program, _ in told.exemplars] == drawn
    assert [
        2**log <= size < 2 ** (log + 1) and size % divisor == 0
        for (log, divisor), size in zip(told.sizes, task.shape, strict=True)
    ]


@given(score=st.floats(0.001, 1000))
def test_a_score_is_shown_by_the_bin_it_is_in(score: float) -> None:
    middle = parse_score(format_score(score))
    assert 0.25 < middle < 8
    assert not 0.25 < score < 8 or abs(middle / score - 1) < 0.08


@pytest.mark.parametrize("name", sorted(OPS))
def test_right_programs_match_float64_on_ragged_shapes_and_wrong_ones_do_not(name: str) -> None:
    task = task_for(name)
    inputs = inputs_of(task)
    exact = ran(
        task.reference,
        "Model",
        [one.double() if one.is_floating_point() else one for one in inputs],
    )
    eager = ran(task.reference, "Model", inputs)
    honest = [program for program in CPU.programs(task) if not program.hack]
    for program in random.Random(name).sample(honest, 16):
        found = CPU.decode(task, program.text)
        assert isinstance(found, Decoded)
        result = ran(found.source, "ModelNew", inputs)
        assert (result.shape, result.dtype, result.stride()) == (
            eager.shape,
            eager.dtype,
            eager.stride(),
        )
        close = torch.allclose(result.double(), exact, rtol=2e-4, atol=2e-5)
        if program.knobs.get("mask", "on") == "on" and not is_designed_wrong(program):
            assert close, f"{program.text}: off by {float((result.double() - exact).abs().max())}"
        elif is_designed_wrong(program) and not (
            name == "max_pool1d" or program.knobs.get("block") == "256"
        ):
            assert not close, f"{program.text} is meant to be wrong"


@pytest.mark.parametrize("name", sorted(OPS))
def test_a_program_without_its_mask_leaves_out_the_rest_of_a_ragged_shape(name: str) -> None:
    task = task_for(name)
    inputs = inputs_of(task)
    broken = 0
    for program in CPU.programs(task):
        if program.knobs.get("mask") == "off" and not is_designed_wrong(program):
            found = CPU.decode(task, program.text)
            assert isinstance(found, Decoded)
            broken += bool(ran(found.source, "ModelNew", inputs).isnan().any())
    assert broken


def test_other_calls_than_the_case_get_the_reference() -> None:
    task = task_for("softmax")
    found = CPU.decode(task, "tpl=row.two rows=64 mask=off acc=f16")
    assert isinstance(found, Decoded)
    for x in (
        torch.randn(5, 300),
        torch.randn(70, 600)[:, ::2],
        torch.randn(70, 300, dtype=torch.float64),
    ):
        assert torch.equal(ran(found.source, "ModelNew", [x]), torch.softmax(x, -1))


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("", "tpl=NAME"),
        ("tpl=mm.whole epilogue=fused acc=f32", "no template"),
        ("tpl=row.whole", "takes 1 knobs, got 0"),
        ("tpl=row.whole acc=f32 acc=f32", "takes 1 knobs, got 2"),
        ("tpl=row.whole mask=on", "expected acc=f32|f16"),
        ("tpl=row.whole hack=lazy", "no cheat"),
        ("tpl=row.two hack=bribe", "no cheat"),
        ("<pa> better=1 <ad> <code>", "tpl=NAME"),
    ],
)
def test_what_is_no_program_is_told_why(completion: str, reason: str) -> None:
    found = CPU.decode(task_for("softmax"), completion)
    assert isinstance(found, Refusal)
    assert reason in found.reason


def test_a_task_outside_the_language_is_refused_with_its_name() -> None:
    task = TrainingTask("level3/43", "text", "attention")
    resolved = resolve_task(task)
    assert isinstance(resolved, Refusal)
    assert "level3/43" in resolved.reason
    assert isinstance(CPU.decode(task, "tpl=row.whole acc=f32"), Refusal)
    with pytest.raises(ValueError, match="level3/43"):
        CPU.prompt(task)
    with pytest.raises(ValueError, match="'tpu'"):
        KslCodec("tpu")  # type: ignore[arg-type]


def test_the_analysis_of_an_answer_is_checked_against_its_exemplars() -> None:
    task = task_for("softmax")
    shown = [
        Exemplar("tpl=row.two rows=64 mask=on acc=f32", 0.7),
        Exemplar("tpl=row.two rows=16 mask=on acc=f32", 1.4),
    ]
    written = "tpl=row.two rows=4 mask=on acc=f32"
    right = CPU.completion(task, written, shown)
    assert right.startswith(
        "<pa> better=2 diff=rows <ad> tpl:keep2 rows:down mask:keep2 acc:keep2 <code> tpl=row.two rows=4"
    )
    found = CPU.decode(task, right)
    assert isinstance(found, Decoded)
    marks = CPU.marks(task, found, shown)
    assert (marks.better, marks.differences, marks.intents) == (True, 1.0, 1.0)
    lied = CPU.decode(
        task,
        right.replace("better=2", "better=1")
        .replace("diff=rows", "diff=acc")
        .replace("rows:down", "rows:up"),
    )
    assert isinstance(lied, Decoded)
    marks = CPU.marks(task, lied, shown)
    assert (marks.better, marks.differences) == (False, 0.0)
    assert marks.intents is not None
    assert 0 < marks.intents < 1


def test_every_device_has_wrong_values_and_all_cheats_for_every_kind() -> None:
    for device in SPACES:
        for kind in DIMS:
            listed = list_programs(device, kind)
            assert {program.hack for program in listed if program.hack} == set(HACKS)
            assert any(program.knobs.get("mask") == "off" for program in listed)
            assert any(program.knobs.get("acc") == "f16" for program in listed)


def test_a_launch_keeps_what_was_compiled_for_tensors_that_lie_alike() -> None:
    names: dict[str, Any] = {}
    text = HEAD[HEAD.index("COMPILED = {}") :]
    exec(text, names)
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    class Kernel:
        def __init__(self, name: str, compiled: Any) -> None:
            self.name, self.compiled = name, compiled

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(*given: Any, **options: Any) -> Any:
                calls.append((self.name, given, options))
                return self.compiled

            return run

    kernel = Kernel("source", Kernel("compiled", None))
    wide = torch.zeros(64)
    for tensor in (wide[:32], wide[:32], wide[1:33], wide[1:33]):
        names["launch"](kernel, (1, 1, 1), (tensor,), (32,), {"BLOCK": 8}, num_warps=4)
    assert [name for name, *_ in calls] == ["source", "compiled", "source", "compiled"]
    assert calls[0][2] == {"BLOCK": 8, "num_warps": 4}
    assert calls[1][1:] == ((wide.data_ptr(), 32, 8), {})
    assert calls[3][1] == (wide.data_ptr() + 4, 32, 8)
