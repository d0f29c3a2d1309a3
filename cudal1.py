"""The short import name: ``import cudal1`` gives the public names of :mod:`torch_cudal1`.

It holds nothing of its own.
"""

from torch_cudal1 import *  # noqa: F403  (the public surface is torch_cudal1.__all__)
from torch_cudal1 import __all__, __version__

__all__ = [*__all__, "__version__"]
