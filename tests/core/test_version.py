"""The version is one text: of the installed package, and readable without torch."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import torch_cudal1
from torch_cudal1.core import version


def test_the_installed_package_has_this_version() -> None:
    assert importlib.metadata.version("torch-cudal1") == version.__version__
    assert torch_cudal1.__version__ == version.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+([ab]|rc|\.dev)?\d*", version.__version__)


def test_packaging_reads_the_file_without_importing_torch() -> None:
    code = (
        "import runpy, sys\n"
        f"print(runpy.run_path({str(Path(version.__file__))!r})['__version__'])\n"
        "assert 'torch' not in sys.modules\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == version.__version__
