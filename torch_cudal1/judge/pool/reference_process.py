"""The reference process of one slot: the references that it has loaded, and their baselines.

A slot stays with one reference while programs for it are measured. When another reference comes,
the input sets of the last one are freed, here and in the process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.judge.evaluate.source_baselines import Baselines
from torch_cudal1.judge.pool.processes import Processes
from torch_cudal1.judge.reference.input_set import ReferenceCache
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.source_reference import SourceReference, read_reference
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child
from torch_cudal1.judge.sandbox.sharing import DeviceSharing

__all__ = ["LoadedReference", "ReferenceProcess"]

# References that one process holds before it is replaced.
_MAX_REFERENCES = 16


@dataclass
class LoadedReference:
    """A loaded reference, its example tensors, and its cached results and baselines."""

    reference: SourceReference
    examples: list[torch.Tensor]
    reference_cache: ReferenceCache = field(default_factory=dict)
    baselines: Baselines | None = None


class ReferenceProcess:
    """Loads references into one process, which is started at first use and after it was lost.

    `loaded`: source text -> reference in the process.
    """

    def __init__(self, processes: Processes, device: torch.device, sharing: DeviceSharing) -> None:
        self._processes, self._device, self._sharing = processes, device, sharing
        self._child: Child | None = None
        # The reference that was measured last.
        self._current = ""
        self.loaded: dict[str, LoadedReference] = {}

    def load(self, text: str) -> LoadedReference:
        """The reference with source `text`. Raises ReferenceFailure, SandboxError."""
        # Input sets are large, and those of two references need not fit.
        if text != self._current:
            self._release_current()
        child = self._child
        if child is None or not child.usable or len(self.loaded) >= _MAX_REFERENCES:
            self.close()
            child = self._child = self._processes.start("own").result()
            child.sharing = self._sharing
        self._current = text
        if text not in self.loaded:
            try:
                reference, examples = read_reference(child, text, self._device)
            except SandboxError as error:
                self.close()
                raise ReferenceFailure(error.stage, error.found) from error
            self.loaded[text] = LoadedReference(reference, examples)
        return self.loaded[text]

    def close(self) -> None:
        """End the process. Safe to call twice."""
        if self._child is not None:
            self._child.close()
        self._child, self.loaded, self._current = None, {}, ""

    def _release_current(self) -> None:
        """Free the input sets of the reference that was measured last."""
        if self._device.type == "cuda":
            self._processes.free_gpu_memory()
        last = self.loaded.get(self._current)
        if last is None or self._child is None:
            return
        last.reference_cache.clear()
        if last.baselines is not None:
            try:
                self._child.call("drop", names=list(last.baselines.sets))
            except CandidateFailure:
                self.close()
            last.baselines = None
        if self._device.type == "cuda":
            # Other slots need the memory that PyTorch would keep in this process.
            torch.cuda.empty_cache()
