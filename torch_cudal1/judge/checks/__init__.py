"""The detectors, one function each, grouped by what they look at. A detector takes a `Trial` and
returns its checks, in order.

It measures and compares; which profile asks which detectors is in `validate`, and the decision is
elsewhere.
"""

from collections.abc import Callable
from typing import TypeAlias

from torch_cudal1.ir.records import Check
from torch_cudal1.judge.reference.trial import Trial

__all__ = ["Detector"]

Detector: TypeAlias = Callable[[Trial], list[Check]]
