"""The codec: programs read back as they were written, and what is no program is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.ksl_cases import CPU, DEVICES, task_for
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.training.ksl.codec import KslCodec
from torch_cudal1.training.ksl.grammar import Device
from torch_cudal1.training.ksl.ops import DIMS, OPS, resolve_task
from torch_cudal1.training.ksl.spaces import list_programs


@pytest.mark.parametrize("device", DEVICES)
def test_every_program_reads_back_as_it_was_written(device: Device) -> None:
    codec = KslCodec(device)
    for kind in DIMS:
        task = task_for(next(name for name, op in OPS.items() if op.kind == kind))
        listed = list_programs(device, kind)
        assert len({program.text for program in listed}) == len(listed)
        for program in listed:
            parsed = codec.parse(task, codec.completion(task, program.text))
            assert not isinstance(parsed, Refusal), parsed
            assert parsed[0] == program
            assert set(program.text.split()) <= set(codec.vocabulary)


@given(
    words=st.lists(st.sampled_from(CPU.vocabulary), max_size=14), name=st.sampled_from(sorted(OPS))
)
@settings(max_examples=300, deadline=None)
def test_any_words_are_a_program_of_the_space_or_undecodable(words: list[str], name: str) -> None:
    task = task_for(name)
    decoded = CPU.decode(task, " ".join(words))
    if isinstance(decoded, Refusal):
        assert decoded.reason
    else:
        assert decoded.program in {program.text for program in CPU.programs(task)}


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
