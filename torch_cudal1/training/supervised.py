"""Supervised fine-tuning on (prompt, answer) rows: only the answer's tokens are learned. Stages 1
and 2 are this on other rows.

A plain loop for models that fit one device. It decides nothing about rows, and keeps no state: the
same rows, settings and seed give the same weights, so a stage that was killed is trained again from
its rows, which are on record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_cudal1.core.errors import SettingError
from torch_cudal1.ingest.llm.policy import Writer

__all__ = ["FitConfig", "Row", "fit"]

_IGNORED = -100  # what torch's cross entropy leaves out


@dataclass(frozen=True)
class Row:
    """What is shown, and what is to be written after it (the end token is added where it is
    missing).
    """

    prompt: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How long and how fast: `steps` of `batch` rows each, learning rate with a short warm-up and a
    cosine to a tenth.
    """

    steps: int = 300
    batch: int = 32
    learning_rate: float = 1e-3
    max_norm: float = 1.0
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "learning_rate", "max_norm"):
            if not getattr(self, name) > 0:
                raise SettingError(name, getattr(self, name), "a number above 0")


def fit(
    writer: Writer,
    rows: Sequence[Row],
    config: FitConfig,
    *,
    seed: int,
    told: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train `writer` in place; the loss of every step, in nats a token. `told(step, loss)` after
    each.
    """
    if not rows:
        raise ValueError(
            "expected at least one row to learn from: no sample succeeded; collect again or train on other tasks"
        )
    encoded = [_encoded(writer, row) for row in rows]
    random = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(
        writer.model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, config.steps))
    losses = []
    order: list[int] = []
    for step in range(config.steps):
        while len(order) < config.batch:
            order += torch.randperm(len(encoded), generator=random).tolist()
        batch, order = [encoded[i] for i in order[: config.batch]], order[config.batch :]
        loss = _loss(writer, batch)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(writer.model.parameters(), config.max_norm)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
        if told is not None:
            told(step, losses[-1])
    return losses


def _encoded(writer: Writer, row: Row) -> tuple[list[int], list[int]]:
    answer = writer.tokenizer(row.answer, add_special_tokens=False)["input_ids"]
    unknown = writer.tokenizer.unk_token_id
    if unknown is not None and unknown in answer:
        lost = next(
            word
            for word in row.answer.split()
            if writer.tokenizer.convert_tokens_to_ids(word) == unknown
        )
        raise SettingError(
            "vocabulary",
            lost,
            "every word of every answer: the model's tokenizer does not know this one",
        )
    end = writer.tokenizer.eos_token_id
    return writer.encoded(row.prompt), answer if answer[-1:] == [end] else [*answer, end]


def _loss(writer: Writer, batch: Sequence[tuple[list[int], list[int]]]) -> Tensor:
    """Mean cross entropy of the answers' tokens; rows are padded on the right, where nothing
    attends.
    """
    width = max(len(prompt) + len(answer) for prompt, answer in batch)
    pad = writer.tokenizer.pad_token_id
    ids = torch.tensor(
        [[*p, *a, *[pad] * (width - len(p) - len(a))] for p, a in batch], device=writer.device
    )
    labels = torch.tensor(
        [[_IGNORED] * len(p) + a + [_IGNORED] * (width - len(p) - len(a)) for p, a in batch],
        device=writer.device,
    )
    mask = torch.tensor(
        [[1] * (len(p) + len(a)) + [0] * (width - len(p) - len(a)) for p, a in batch],
        device=writer.device,
    )
    logits = writer.model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED
    )


def _rate(step: int, steps: int) -> float:
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
