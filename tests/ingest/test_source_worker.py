"""The child's request `lower`: a Program with its binaries in a file, or a reason; never an exception
for a source that has no data form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ingest.published_sources import REFERENCE, read_source, write_candidate
from torch_cudal1.ingest.published import source_worker
from torch_cudal1.judge.wire.channel import save_tensors
from torch_cudal1.judge.wire.transport import read_program
from torch_cudal1.judge.worker.session import HANDLERS as JUDGE_HANDLERS
from torch_cudal1.judge.worker.session import Session

CPU = torch.device("cpu")


@pytest.fixture
def request_fields(tmp_path: Path) -> dict[str, Any]:
    """A request for the reference's Program."""
    _, form, tensors = read_source(REFERENCE, tmp_path)
    tensor_file = tmp_path / "tensors.safetensors"
    return {
        "text": REFERENCE,
        "reference": True,
        "form": form.to_json(),
        "layout": save_tensors(tensors, tensor_file),
        "given": str(tensor_file),
        "path": str(tmp_path / "payloads.safetensors"),
    }


def lower(tmp_path: Path, **fields: Any) -> dict[str, Any]:
    return source_worker.HANDLERS["lower"](Session(CPU, tmp_path), fields)


@pytest.mark.usefixtures("dynamo")
def test_a_reference_and_a_candidate_are_answered_as_programs_that_the_parent_can_read(
    tmp_path: Path, request_fields: dict[str, Any]
) -> None:
    reference = lower(tmp_path, **request_fields)
    candidate = lower(
        tmp_path,
        **request_fields
        | {
            "text": write_candidate(),
            "reference": False,
            "form": request_fields["form"] | {"entry": "ModelNew"},
        },
    )
    for answer in (reference, candidate):
        program = read_program(answer["program"], answer["payloads"])
        assert len(answer["sources"]) == len(answer["roles"]) == len(program.inputs) == 4
        assert set(answer["sources"]) == {0, 1, "scale", "shift"}
    assert reference["program"] != candidate["program"]


def test_a_source_without_a_data_form_is_an_answer_with_the_reason(
    tmp_path: Path, request_fields: dict[str, Any]
) -> None:
    answer = lower(
        tmp_path,
        **request_fields
        | {
            "text": write_candidate("return x * float(y.sum())"),
            "reference": False,
            "form": request_fields["form"] | {"entry": "ModelNew"},
        },
    )
    assert list(answer) == ["not_lowerable"]
    assert "looks at the values of tensors" in answer["not_lowerable"]


def test_a_source_that_fails_raises_its_own_exception(
    tmp_path: Path, request_fields: dict[str, Any]
) -> None:
    with pytest.raises(ZeroDivisionError):
        lower(tmp_path, **request_fields | {"text": "1 / 0"})


def test_every_request_of_the_judge_is_served_too() -> None:
    handlers = dict(source_worker.HANDLERS)
    assert handlers.pop("lower") is not None
    assert handlers == JUDGE_HANDLERS
