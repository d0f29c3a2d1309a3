"""Fresh memory is filled, redzones and guard blocks answer digests, and usage counts what grows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.judge.programs import linear_relu
from tests.judge.worker.sessions import SLOT, call, make_inputs, put, read_outputs
from torch_cudal1.judge.wire.redzone_patterns import REDZONE_BYTES, redzone_digest
from torch_cudal1.judge.wire.transport import write_payloads
from torch_cudal1.judge.worker.memory_handlers import _split_block, fill_free_blocks
from torch_cudal1.judge.worker.session import Session

CUDA = torch.device("cuda", 0)
LEAKED_BYTES = 32 << 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_fresh_memory_is_filled_in_segments_for_small_and_for_large_blocks() -> None:
    for size in (16_384, 3 << 20):
        neighbour = torch.zeros(size, dtype=torch.uint8, device=CUDA)
        freed = torch.zeros(size, dtype=torch.uint8, device=CUDA)
        del freed
        fill_free_blocks(63, CUDA)
        assert bool((torch.empty(size, dtype=torch.uint8, device=CUDA) == 63).all())
        del neighbour


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_memory_of_other_streams_is_filled_too_where_it_is_asked_for() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        freed = torch.zeros(3 << 20, dtype=torch.uint8, device=CUDA)
        address = freed.data_ptr()
        del freed
    fill_free_blocks(63, CUDA, everywhere=True)
    with torch.cuda.stream(side):
        reused = torch.empty(3 << 20, dtype=torch.uint8, device=CUDA)
        assert reused.data_ptr() == address
        assert bool((reused == 63).all())


def return_fresh_memory(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """A slot that returns memory which it did not write."""
    return [torch.empty(64), torch.empty(8, dtype=torch.int64)]


def test_without_a_byte_fresh_floats_are_nan_and_integers_their_largest_value(
    session: Session, tmp_path: Path
) -> None:
    session.slots[SLOT], session.sets["set"] = return_fresh_memory, []
    path = tmp_path / "outputs"
    answer = call(
        session, "poisoned", slot=SLOT, inputs="set", byte=None, deterministic=False, path=str(path)
    )
    assert answer["control"] is True
    floats, integers = read_outputs(answer, path)
    assert floats is not None
    assert integers is not None
    assert bool(floats.isnan().all())
    assert bool((integers == torch.iinfo(torch.int64).max).all())
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.parametrize("offset", [None, -1, 4 * 8], ids=["intact", "before", "behind"])
def test_a_byte_written_beside_an_input_changes_the_digest_of_its_redzones_alone(
    session: Session, tmp_path: Path, offset: int | None
) -> None:
    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        if offset is not None:
            memory = torch.empty(0, dtype=torch.uint8).set_(inputs[3].untyped_storage())
            place = 4 * inputs[3].storage_offset() + offset
            memory[place] = ~memory[place]
        return [inputs[3] + 1]

    put(session, "set", make_inputs(1))
    session.slots[SLOT] = run
    path = tmp_path / "outputs"
    answer = call(
        session,
        "banded",
        slot=SLOT,
        inputs="set",
        positions=[1, 3],
        seed=40,
        holes=[],
        path=str(path),
    )
    assert answer["bands"]["1"] == redzone_digest(41)
    assert (answer["bands"]["3"] == redzone_digest(43)) == (offset is None)
    (result,) = read_outputs(answer, path)
    assert result is not None
    assert torch.equal(result, make_inputs(1)[3] + 1)
    assert REDZONE_BYTES > 4 * 8


def test_an_instrumented_program_without_launches_computes_what_it_did(
    session: Session, tmp_path: Path
) -> None:
    program = linear_relu().program
    call(
        session,
        "instrument",
        slot=SLOT,
        program=program.to_json(),
        payloads=write_payloads(program, tmp_path / "payloads"),
        skip=-1,
        seed=None,
        fill=None,
        side=None,
    )
    x, weight, bias = (torch.randn(spec.shape) for spec in program.inputs)
    (result,) = session.slots[SLOT]([x, weight, bias])
    assert result is not None
    torch.testing.assert_close(result, torch.relu(x @ weight.t() + bias))


def test_a_forgotten_slot_is_empty(session: Session) -> None:
    session.slots[SLOT] = return_fresh_memory
    call(session, "forget", slot=SLOT)
    call(session, "forget", slot=SLOT)
    assert session.slots == {}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_usage_counts_descriptors_files_and_memory_that_calls_leave(session: Session) -> None:
    kept_tensors, files = [], []

    def leak(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        kept_tensors.append(torch.ones(LEAKED_BYTES // 4))
        files.append((session.scratch / f"file {len(files)}").open("w"))
        return []

    session.slots[SLOT], session.sets["set"] = leak, []
    before = call(session, "usage")["usage"]
    after = call(session, "many", slot=SLOT, inputs="set", calls=5)["usage"]
    for file in files:
        file.close()
    assert after["descriptors"] == before["descriptors"] + 5
    assert after["files"] == before["files"] + 5
    # The session is in this process, which may free some of its own memory meanwhile.
    assert after["data_bytes"] >= before["data_bytes"] + 5 * LEAKED_BYTES // 2
    assert "gpu_bytes" not in after


def test_a_block_for_small_requests_is_taken_by_requests_of_a_megabyte_at_most() -> None:
    assert _split_block(5 << 19, small=True) == [1 << 20, 1 << 20, 1 << 19]
    assert _split_block(2 << 20, small=True) == [1 << 20, 1 << 20]
    assert _split_block(5 << 19, small=False) == [5 << 19]
