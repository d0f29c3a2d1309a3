"""The installed package offers its backend to torch.compile by name; nobody has to import it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

INSTALLED = any(point.name == "cudal1" for point in entry_points(group="torch_dynamo_backends"))


@pytest.mark.skipif(
    not INSTALLED,
    reason="torch-cudal1 is not installed (pip install -e .), so there is no entry point",
)
def test_the_backend_is_found_by_its_name_without_an_import(tmp_path):
    code = """
import sys, torch
assert "cudal1" in torch._dynamo.list_backends()
net, x = torch.nn.Linear(8, 4), torch.randn(3, 8)
compiled = torch.compile(net, backend="cudal1", options={"strictness": "error", "epilogue_fusion": False})
assert "torch_cudal1" in sys.modules and "torch._inductor.compile_fx" not in sys.modules
with torch.no_grad():
    torch.testing.assert_close(compiled(x), net(x))
import torch_cudal1
assert torch_cudal1.report().counters["resolve.miss"] == 1
"""
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        },
        capture_output=True,
        text=True,
        timeout=180,
        cwd=tmp_path,
    )
    assert process.returncode == 0, process.stderr[-3000:]
