"""A child whose worker runs in this process: for tests of what the parent asks and makes of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torch_cudal1.judge.sandbox.child import CandidateFailure
from torch_cudal1.judge.wire.channel import save_tensors
from torch_cudal1.judge.worker.session import HANDLERS, Session, _answer

__all__ = ["InProcessChild"]

CPU = torch.device("cpu")


class InProcessChild:
    """Serves requests at once, for trusted sources only.

    `verbs`: of the requests so far. `changes`: verb -> a function of the honest answer, for
    processes that answer something else. `sent_bytes`: of the tensors that were sent, by set.
    """

    def __init__(self, folder: Path) -> None:
        self.session = Session(CPU, folder)
        self.usable = True
        self.verbs: list[str] = []
        self.changes: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {}
        self.sent_positions: dict[str, list[int]] = {}
        self._files = 0

    def reserve_file(self) -> Path:
        self._files += 1
        return self.session.scratch / f"{self._files}.safetensors"

    def write_message(self, tensors: Sequence[torch.Tensor | None]) -> tuple[Path, list[Any]]:
        path = self.reserve_file()
        return path, save_tensors(tensors, path)

    def put(self, name: str, tensors: Sequence[torch.Tensor | None], *, base: str = "") -> None:
        self.sent_positions[name] = [i for i, tensor in enumerate(tensors) if tensor is not None]
        path, layout = self.write_message(tensors)
        self.call("put", name=name, layout=layout, path=str(path), base=base)

    def drop(self, names: Sequence[str], size_bytes: int) -> None:
        self.call("drop", names=list(names))

    @contextmanager
    def enlarge_arena(self, size_bytes: int) -> Iterator[None]:
        yield

    def call(self, verb: str, **fields: Any) -> dict[str, Any]:
        self.verbs.append(verb)
        answer = _answer(self.session, {"verb": verb, **fields}, HANDLERS)
        answer = self.changes.get(verb, dict)(answer)
        if "error" in answer:
            raise CandidateFailure(verb, answer["error"], str(answer.get("detector") or verb))
        return answer
