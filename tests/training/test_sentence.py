"""Prompts and scores as words, and back."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.ksl_cases import DEVICES, task_for
from torch_cudal1.ingest.llm.records import Exemplar
from torch_cudal1.training.ksl.codec import KslCodec
from torch_cudal1.training.ksl.grammar import Device
from torch_cudal1.training.ksl.ops import OPS
from torch_cudal1.training.ksl.sentence import format_score, parse_score, read_prompt, write_prompt
from torch_cudal1.training.ksl.spaces import list_programs


@given(data=st.data(), device=st.sampled_from(DEVICES), name=st.sampled_from(sorted(OPS)))
@settings(max_examples=100, deadline=None)
def test_a_prompt_reads_back_with_its_exemplars(
    data: st.DataObject, device: Device, name: str
) -> None:
    task = task_for(name)
    drawn = data.draw(st.lists(st.sampled_from(list_programs(device, OPS[name].kind)), max_size=3))
    prompt = write_prompt(task, [Exemplar(program.text, 1.5) for program in drawn], device)
    assert set(prompt.split()) <= set(KslCodec(device).vocabulary)
    parsed = read_prompt(prompt)
    assert (parsed.device, parsed.kind, parsed.graph) == (device, OPS[name].kind, OPS[name].graph)
    assert [program for program, _ in parsed.exemplars] == drawn
    assert [
        2**log <= size < 2 ** (log + 1) and size % divisor == 0
        for (log, divisor), size in zip(parsed.sizes, task.shape, strict=True)
    ]


@given(score=st.floats(0.001, 1000))
def test_a_score_is_shown_by_the_bin_it_is_in(score: float) -> None:
    middle = parse_score(format_score(score))
    assert 0.25 < middle < 8
    assert not 0.25 < score < 8 or abs(middle / score - 1) < 0.08
