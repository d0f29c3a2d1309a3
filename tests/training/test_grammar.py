"""Words that spell no program."""

from __future__ import annotations

import pytest

from tests.training.ksl_cases import CPU, task_for
from torch_cudal1.core.refusal import Refusal


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
def test_text_that_is_no_program_is_refused_with_the_reason(completion: str, reason: str) -> None:
    refusal = CPU.decode(task_for("softmax"), completion)
    assert isinstance(refusal, Refusal)
    assert reason in refusal.reason
