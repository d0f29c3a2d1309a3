"""Generated inputs depend on their seed alone, and answers hold pieces of large outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.judge.worker.sessions import SLOT, call, read_outputs
from torch_cudal1.judge.worker.int64_handlers import PIECE_ELEMENTS, _cut_pieces, generate_tensor
from torch_cudal1.judge.worker.session import Session

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
)
def test_the_same_seed_makes_the_same_numbers_within_their_bound(dtype: torch.dtype) -> None:
    first, second = (generate_tensor((100, 3), dtype, CPU, seed, 5) for seed in (1, 2))
    assert torch.equal(first, generate_tensor((100, 3), dtype, CPU, 1, 5))
    assert not torch.equal(first, second)
    if not dtype.is_floating_point:
        assert 0 <= int(first.min()) <= int(first.max()) < 5


def test_a_call_on_grown_inputs_answers_pieces_and_leaves_the_input_set_alone(
    session: Session, tmp_path: Path
) -> None:
    session.slots[SLOT] = lambda inputs: [inputs[0] * 2, None]
    session.sets["set"] = [torch.ones(3)]
    path = tmp_path / "pieces"
    rows = 2 * PIECE_ELEMENTS
    answer = call(
        session,
        "vast",
        slot=SLOT,
        inputs="set",
        grown=[[0, [rows], None]],
        seed=7,
        pieces=[0.0, 1.0],
        path=str(path),
    )
    doubled = 2 * generate_tensor((rows,), torch.float32, CPU, 7, None)
    first, last = read_outputs(answer, path)
    assert first is not None
    assert last is not None
    assert torch.equal(first, doubled[:PIECE_ELEMENTS])
    assert torch.equal(last, doubled[-PIECE_ELEMENTS:])
    assert len(answer["facts"]) == 2
    assert torch.equal(session.sets["set"][0], torch.ones(3))


def test_a_small_output_is_one_piece_of_its_own_size() -> None:
    (piece,) = _cut_pieces(torch.arange(6.0).view(2, 3).t(), [0.5])
    assert piece.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
