"""Supervised fine-tuning on (prompt, answer) rows, with the loss over the answer's tokens. Stages 1
and 2 call it with different rows.

A plain loop for models that fit one device. It keeps no state: the same rows, settings and seed
give the same weights, so a stage that was killed is trained again from its rows, which are on
record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_cudal1.core.errors import SettingError
from torch_cudal1.ingest.llm.policy import LanguageModel

__all__ = ["FitConfig", "SftRow", "fine_tune"]

# The labels that torch's cross entropy leaves out: its default `ignore_index`, which transformers
# uses too.
_IGNORED_LABEL = -100


@dataclass(frozen=True)
class SftRow:
    """A prompt, and the answer to learn (the end token is added where it is missing)."""

    prompt: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """Length and rate of a fit: `steps` of `batch` rows each; the learning rate has a short warm-up
    and falls by a cosine to a tenth.
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


def fine_tune(
    writer: LanguageModel,
    rows: Sequence[SftRow],
    config: FitConfig,
    *,
    seed: int,
    report: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train `writer` in place. Returns the loss of every step, in nats a token. `report(step,
    loss)` is called after each step.
    """
    if not rows:
        raise ValueError(
            "expected at least one row to learn from: no sample succeeded; collect again or train on other tasks"
        )
    # Before the first step: a row with an unknown word is refused before anything is trained.
    encoded = [_encode_row(writer, row) for row in rows]
    # A generator of its own: the global one is also drawn from by dropout and by other code, and
    # the order of rows would depend on it.
    random = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(
        writer.model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: _scale_learning_rate(step, config.steps)
    )
    losses = []
    order: list[int] = []
    for step in range(config.steps):
        # Every row comes once before any comes again; a batch larger than all rows takes several
        # permutations.
        while len(order) < config.batch:
            order += torch.randperm(len(encoded), generator=random).tolist()
        batch, order = [encoded[i] for i in order[: config.batch]], order[config.batch :]
        loss = _compute_loss(writer, batch)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(writer.model.parameters(), config.max_norm)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
        if report is not None:
            report(step, losses[-1])
    return losses


def _encode_row(writer: LanguageModel, row: SftRow) -> tuple[list[int], list[int]]:
    # The prompt brings its own special tokens; a start token in the middle would be learned.
    answer = writer.tokenizer(row.answer, add_special_tokens=False)["input_ids"]
    unknown_id = writer.tokenizer.unk_token_id
    # Training on the unknown token would teach the model to write it, and none of its programs
    # would parse.
    if unknown_id is not None and unknown_id in answer:
        unknown_word = next(
            word
            for word in row.answer.split()
            if writer.tokenizer.convert_tokens_to_ids(word) == unknown_id
        )
        raise SettingError(
            "vocabulary",
            unknown_word,
            "every word of every answer: the model's tokenizer does not know this one",
        )
    end = writer.tokenizer.eos_token_id
    # Without an end token the model never learns to stop, and every completion runs to its limit.
    return writer.encoded(row.prompt), answer if answer[-1:] == [end] else [*answer, end]


def _compute_loss(writer: LanguageModel, batch: Sequence[tuple[list[int], list[int]]]) -> Tensor:
    """Mean cross entropy of the answers' tokens. Rows are padded on the right, and the mask keeps
    padding out of the attention.
    """
    # The longest row of this batch, not of all rows: the rest would be computed on padding.
    width = max(len(prompt) + len(answer) for prompt, answer in batch)
    pad = writer.tokenizer.pad_token_id
    ids = torch.tensor(
        [[*p, *a, *[pad] * (width - len(p) - len(a))] for p, a in batch], device=writer.device
    )
    labels = torch.tensor(
        [
            # The prompt is given, not to be learned: with it in the loss, most of the gradient
            # would go to reproducing tasks and exemplars.
            [_IGNORED_LABEL] * len(p) + a + [_IGNORED_LABEL] * (width - len(p) - len(a))
            for p, a in batch
        ],
        device=writer.device,
    )
    mask = torch.tensor(
        [[1] * (len(p) + len(a)) + [0] * (width - len(p) - len(a)) for p, a in batch],
        device=writer.device,
    )
    # float32: the softmax over the vocabulary loses digits in bfloat16. No cache, which only
    # decoding needs.
    logits = writer.model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(
        # Token t is predicted from those before it.
        logits[:, :-1].flatten(0, 1),
        labels[:, 1:].flatten(),
        ignore_index=_IGNORED_LABEL,
    )


def _scale_learning_rate(step: int, steps: int) -> float:
    # The first 5 %: Adam's second moments are estimates of few gradients there.
    warmup_steps = max(1, steps // 20)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.1 + 0.45 * (
        1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps))
    )
