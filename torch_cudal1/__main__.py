"""The command line: `cudal1 COMMAND`, also `python -m torch_cudal1 COMMAND`."""

import sys

from torch_cudal1.cli.main import main
from torch_cudal1.cli.parser import parser

__all__ = ["main", "parser"]

if __name__ == "__main__":
    sys.exit(main())
