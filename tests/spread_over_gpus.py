"""A pytest plugin: each xdist worker sees one GPU. `GPUS=2 python -m pytest -n 16 -p
tests.spread_over_gpus`.

Loaded before any test module, so before CUDA starts in the worker; what a worker starts inherits
it.
"""

from __future__ import annotations

import os

__all__ = ["choose_gpu"]


def choose_gpu(worker: str, count: int) -> str:
    """The GPU of xdist's worker `gw3` among `count`, as CUDA_VISIBLE_DEVICES writes it."""
    return str(int(worker.removeprefix("gw")) % count)


if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = choose_gpu(
        os.environ["PYTEST_XDIST_WORKER"], int(os.environ.get("GPUS", "1"))
    )
