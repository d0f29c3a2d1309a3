"""Redzones show each changed byte, and leave the tensor between them as it was."""

from __future__ import annotations

import pytest
import torch

from torch_cudal1.judge.wire.redzone_patterns import REDZONE_BYTES, SOLID, redzone_digest
from torch_cudal1.judge.wire.tensor_bits import same_bits
from torch_cudal1.judge.worker.redzone_tensors import Redzones


@pytest.mark.parametrize("seed", [5, 123_456, SOLID])
def test_a_changed_byte_changes_the_digest_and_the_tensor_does_not(seed: int) -> None:
    tensor = torch.randn(6, 5).t()[1:]
    redzones = Redzones.around(tensor, seed)
    assert same_bits(redzones.tensor, tensor)
    assert redzones.tensor.stride() == tensor.stride()
    assert redzones.digest() == redzone_digest(seed)
    redzones.tensor.fill_(1.0)
    assert redzones.digest() == redzone_digest(seed)
    end = redzones.buffer.numel()
    for place in (0, redzones.left_bytes - 1, end - REDZONE_BYTES, end - 1):
        redzones.buffer[place] ^= 1
        assert redzones.digest() != redzone_digest(seed)
        redzones.buffer[place] ^= 1
    assert redzones.digest() == redzone_digest(seed)
