"""Two and four ranks, each on its own GPU (nccl), run what the first one knows: inside DDP, FSDP2
and tensor parallelism.
"""

from __future__ import annotations

import pytest
import torch

from tests.api import test_ranks_sharded as sharded
from tests.api.rank_crew import crew


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_every_gpu_runs_what_the_first_rank_knows(world, tmp_path):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} NVIDIA GPUs")
    outcomes = crew(world, tmp_path, "cuda")
    sharded.check_data_parallel(outcomes)
    sharded.check(outcomes)
