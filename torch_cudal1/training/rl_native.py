"""GRPO in one screenful: the loss, the step, the loop; checked against TRL's loss on the same batch
by a test.

    maximise  E[ mean_i mean_t min(rho A, clip(rho, 1 - low, 1 + high) A) - beta KL(pi || pi_ref) ],   rho = pi / pi_old

with advantages A standardised inside a group (CUDA-L1 section 2.4.5; DeepSeekMath equations 3 and
4). Where rollouts and rewards come from is the caller's `gather`. For models that fit one device;
several devices, LoRA and vLLM are `rl_trl`'s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from torch_cudal1.core.errors import SettingError
from torch_cudal1.ingest.llm.policy import Rollout, Writer, recovered, replaced, token_logprobs
from torch_cudal1.training.smoothing import Smoothing
from torch_cudal1.training.smoothing import advantages as standardised

__all__ = [
    "Batch",
    "Generation",
    "GrpoConfig",
    "advantages",
    "grpo_loss",
    "token_advantages",
    "train",
]


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """What a run of reinforcement learning is made of; the paper names none of these numbers, so
    they are choices.

    `group`: completions of one prompt (G). `groups`: prompts a step. `epochs`: passes over a step's
    samples, in `minibatches`. `beta`: weight of the divergence from the starting model.
    `smoothing`: what happens to rewards before they are standardised (`gather` does that) and to
    advantages after. `objective`: "mean", or "max@k" for the expected best of `best_of` samples.
    `credit`: "whole", or "split": tokens before the program are credited with its being right,
    tokens of it with the reward.
    """

    steps: int = 100
    group: int = 8
    groups: int = 8
    epochs: int = 2
    minibatches: int = 1
    learning_rate: float = 3e-4
    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0
    temperature: float = 1.0
    entropy: float = 0.0
    max_norm: float = 1.0
    smoothing: Smoothing = field(default_factory=Smoothing)
    objective: Literal["mean", "max@k"] = "mean"
    best_of: int = 4
    credit: Literal["whole", "split"] = "whole"
    save_every: int = 10

    def __post_init__(self) -> None:
        for name in ("group", "best_of"):
            if getattr(self, name) < 2:
                raise SettingError(
                    name,
                    getattr(self, name),
                    "at least 2: an advantage compares members of a group",
                )
        for name in (
            "steps",
            "groups",
            "epochs",
            "minibatches",
            "learning_rate",
            "temperature",
            "save_every",
            "max_norm",
        ):
            if not getattr(self, name) > 0:
                raise SettingError(name, getattr(self, name), "a number above 0")
        if self.best_of > self.group or (self.group * self.groups) % self.minibatches:
            raise SettingError(
                "best_of, minibatches",
                (self.best_of, self.minibatches),
                "at most `group`; a divisor of all samples",
            )
        if self.beta < 0 or not 0 < self.clip_low < 1 or self.clip_high <= 0:
            raise SettingError(
                "beta, clip",
                (self.beta, self.clip_low, self.clip_high),
                "no negative beta; clips from 0 to 1",
            )


@dataclass(frozen=True)
class Generation:
    """One step's samples with their rewards, members of a group next to each other. `facts`: what
    the log should say of them.

    For split credit: `right`, 1 for a sample that is right, and `program`, 1 for tokens of the
    program; see `token_advantages`.
    """

    rollout: Rollout
    rewards: Tensor  # (N,)
    facts: Mapping[str, float]
    right: Tensor | None = None  # (N,)
    program: Tensor | None = None  # (N, T)


Gather: TypeAlias = Callable[
    [Writer, int], Generation | None
]  # None: what may be measured is spent, and training ends
Log: TypeAlias = Callable[[int, Mapping[str, float]], None]


@dataclass(frozen=True)
class Batch:
    """What the loss needs beside the policy. advantages: (N, T) or (N, 1); old, reference: (N, T);
    no reference where beta is 0.
    """

    rollout: Rollout
    advantages: Tensor
    old: Tensor
    reference: Tensor | None = None

    def rows(self, index: Tensor) -> Batch:
        """Only these samples."""
        r = self.rollout
        part = Rollout(r.prompt_ids[index], r.prompt_mask[index], r.ids[index], r.mask[index])
        return Batch(
            part,
            self.advantages[index],
            self.old[index],
            None if self.reference is None else self.reference[index],
        )


def advantages(rewards: Tensor, config: GrpoConfig) -> Tensor:
    """(N,) rewards to (N,) advantages, standardised inside each group by the sample standard
    deviation plus 1e-4, as TRL does.
    """
    grouped = rewards.view(-1, config.group)
    if config.objective == "max@k":
        return (
            _best_of_gains(grouped, config.best_of) / (grouped.std(1, keepdim=True) + 1e-4)
        ).reshape(-1)
    return torch.tensor(
        [each for group in grouped.tolist() for each in standardised(group, config.smoothing)]
    )


def token_advantages(generation: Generation, config: GrpoConfig) -> Tensor:
    """(N, 1), or (N, T) with split credit: a plan is worth what a right program is, a program its
    reward (as in TritonRL).
    """
    whole = advantages(generation.rewards, config).unsqueeze(1)
    if config.credit == "whole":
        return whole
    if generation.right is None or generation.program is None:
        raise ValueError(
            "split credit needs to know which samples are right, and which tokens are of the program"
        )
    return torch.where(
        generation.program.cpu() > 0, whole, advantages(generation.right, config).unsqueeze(1)
    )


def grpo_loss(logprobs: Tensor, batch: Batch, config: GrpoConfig) -> Tensor:
    """The scalar to minimise: the mean over samples of the mean over a sample's tokens.

    TRL's `loss_type="grpo"` with `use_bias_correction_kl=False`: the divergence is weighted by beta
    alone, as in the paper.
    """
    mask = batch.rollout.mask
    ratio = (logprobs - batch.old).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    token = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    if config.beta:
        if batch.reference is None:
            raise ValueError(
                "beta is above 0, but the batch has no log-probabilities of the reference model"
            )
        apart = batch.reference - logprobs
        token = token + config.beta * (apart.exp() - apart - 1)  # k3: unbiased, never negative
    return ((token * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def train(
    writer: Writer,
    gather: Gather,
    config: GrpoConfig,
    *,
    folder: Path,
    seed: int,
    log: Log | None = None,
) -> Writer:
    """Train `writer` in place, from the checkpoint in `folder` if there is one; the trained model
    is in `folder` at the end.

    `gather` must answer the same for the same step, from its journal where a step was measured
    before: then a run that was killed goes on as if nothing had happened. `folder` then holds the
    model (safetensors), the optimiser's state and `state.json`.
    """
    reference = _reference(writer, config)
    optimiser = torch.optim.AdamW(
        writer.model.parameters(), lr=config.learning_rate, weight_decay=0.0, betas=(0.9, 0.95)
    )
    done = _restored(writer, optimiser, folder)
    for step in range(done, config.steps):
        generation = gather(writer, step)
        if generation is None:
            _save(writer, optimiser, folder, step)
            break
        facts = _update(
            writer, reference, optimiser, generation, config, seed=seed * 1_000_003 + step
        )
        if (step + 1) % config.save_every == 0 or step + 1 == config.steps:
            _save(writer, optimiser, folder, step + 1)
        if log is not None:
            log(step, {**generation.facts, **facts})
    return writer


def _update(
    writer: Writer,
    reference: Any,
    optimiser: torch.optim.Optimizer,
    generation: Generation,
    config: GrpoConfig,
    *,
    seed: int,
) -> dict[str, float]:
    rollout, found = generation.rollout, token_advantages(generation, config).to(writer.device)
    with torch.no_grad():
        old = token_logprobs(writer.model, rollout, config.temperature)[0]
        base = (
            token_logprobs(reference, rollout, config.temperature)[0]
            if reference is not None
            else None
        )
    batch = Batch(rollout, found, old, base)
    losses: list[float] = []
    entropies: list[float] = []
    for index in _minibatches(len(rollout), config, seed):
        part = batch.rows(index.to(writer.device))
        logprobs, entropy = token_logprobs(writer.model, part.rollout, config.temperature)
        spread = (entropy * part.rollout.mask).sum() / part.rollout.mask.sum().clamp(min=1)
        loss = grpo_loss(logprobs, part, config) - (
            config.entropy * spread if config.entropy else 0.0
        )
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(writer.model.parameters(), config.max_norm)
        optimiser.step()
        losses.append(loss.item())
        entropies.append(spread.item())
    return {"loss": sum(losses) / len(losses), "entropy": entropies[0]}


def _minibatches(total: int, config: GrpoConfig, seed: int) -> Iterator[Tensor]:
    random = torch.Generator().manual_seed(seed)
    for _ in range(config.epochs):
        yield from torch.randperm(total, generator=random).chunk(config.minibatches)


def _best_of_gains(grouped: Tensor, k: int) -> Tensor:
    """How much each member raises the expected best of k: E[max(0, r_i - best of k - 1 others)]
    over draws without replacement.
    """
    gains = torch.empty_like(grouped)
    members = grouped.shape[1]
    chance = torch.tensor(
        [math.comb(j, k - 2) / math.comb(members - 1, k - 1) for j in range(members - 1)]
    )
    for i in range(members):
        others = (
            torch.cat([grouped[:, :i], grouped[:, i + 1 :]], 1).sort(1).values
        )  # the j-th is the best of the draw by `chance`
        gains[:, i] = ((grouped[:, i : i + 1] - others).clamp(min=0) * chance).sum(1)
    return gains


def _reference(writer: Writer, config: GrpoConfig) -> Any:
    """A frozen copy of the starting model where the divergence from it counts; read from its
    folder, as TRL does.
    """
    if not config.beta:
        return None
    path = Path(writer.name)
    return Writer.load(
        path if path.is_dir() else writer.name, device=str(writer.device)
    ).model.requires_grad_(False)


def _save(writer: Writer, optimiser: torch.optim.Optimizer, folder: Path, done: int) -> None:
    moments = {
        f"{name}.{i}": value.contiguous()
        for i, state in optimiser.state_dict()["state"].items()
        for name, value in state.items()
    }
    with replaced(folder) as fresh:
        writer.model.save_pretrained(fresh, safe_serialization=True)
        writer.tokenizer.save_pretrained(fresh)
        save_file(moments, fresh / "optimiser.safetensors")
        (fresh / "state.json").write_text(json.dumps({"steps": done}), encoding="utf-8")


def _restored(writer: Writer, optimiser: torch.optim.Optimizer, folder: Path) -> int:
    """Put model and optimiser back to the last checkpoint. The number of steps that it has behind
    it; 0 without one.
    """
    if not recovered(folder) or not (folder / "state.json").is_file():
        return 0
    trained = Writer.load(folder, device=str(writer.device))
    writer.model.load_state_dict(trained.model.state_dict())
    held = load_file(folder / "optimiser.safetensors", device=str(writer.device))
    whole = optimiser.state_dict()
    for key, value in held.items():
        name, _, i = key.rpartition(".")
        whole["state"].setdefault(int(i), {})[name] = value
    optimiser.load_state_dict(whole)
    return int(json.loads((folder / "state.json").read_text(encoding="utf-8"))["steps"])
