"""GRPO in one screenful: the loop, the step, the loss; a test compares the loss with TRL's on the
same batch.

    maximise  E[ mean_i mean_t min(rho A, clip(rho, 1 - low, 1 + high) A) - beta KL(pi || pi_ref) ]
    with rho = pi / pi_old

and advantages A standardised inside a group (CUDA-L1 section 2.4.5; DeepSeekMath equations 3 and
4). Rollouts and rewards come from the caller's `generate`, such as `contrastive.ContrastiveStep`.
For models that fit one device; several devices, LoRA and vLLM are `grpo_trl`'s.
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
from torch_cudal1.ingest.llm.policy import (
    LanguageModel,
    Rollout,
    compute_token_logprobs,
    recover_folder,
    replace_folder,
)
from torch_cudal1.training.smoothing import Smoothing, standardize_group

__all__ = [
    "GenerateStep",
    "Generation",
    "GrpoConfig",
    "PolicyBatch",
    "compute_advantages",
    "compute_token_advantages",
    "grpo_loss",
    "train_policy",
]


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """Hyper-parameters of reinforcement learning. The paper names none of these numbers, so they
    are choices.

    `group`: completions of one prompt (G). `groups`: prompts of a step. `epochs`: passes over a
    step's samples, in `minibatches`. `beta`: weight of the KL divergence from the starting model.
    `entropy`: weight of an entropy bonus. `smoothing`: of rewards before they are standardised
    (`generate` does that) and of advantages after. `objective`: "mean", or "max@k" for the expected
    best of `best_of` samples. `credit`: "whole", or "split": tokens before the program are credited
    with its correctness, tokens of the program with the reward.
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
        # A group of one has the standardised advantage 0, so the policy would never change.
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
        # The best of k is drawn without replacement from a group, so k cannot exceed it.
        # Minibatches of different sizes would weigh their samples differently, since each is one
        # gradient step.
        if self.best_of > self.group or (self.group * self.groups) % self.minibatches:
            raise SettingError(
                "best_of, minibatches",
                (self.best_of, self.minibatches),
                "at most `group`; a divisor of all samples",
            )
        # The lower bound of the ratio is 1 - clip_low: from 1 on it is never reached, and nothing
        # is clipped. The upper bound has no such limit (clip-higher in later work).
        if self.beta < 0 or not 0 < self.clip_low < 1 or self.clip_high <= 0:
            raise SettingError(
                "beta, clip",
                (self.beta, self.clip_low, self.clip_high),
                "no negative beta; clips from 0 to 1",
            )


@dataclass(frozen=True)
class Generation:
    """One step's samples with their rewards; members of a group are next to each other. `metrics`:
    numbers for the log.

    For split credit also `is_correct`, 1 for a correct sample, and `program_mask`, 1 for the tokens
    of the program; see `compute_token_advantages`.
    """

    rollout: Rollout
    rewards: Tensor  # (N,)
    metrics: Mapping[str, float]
    is_correct: Tensor | None = None  # (N,)
    program_mask: Tensor | None = None  # (N, T)


# None: the measurement budget is spent, and training ends.
GenerateStep: TypeAlias = Callable[[LanguageModel, int], Generation | None]
Log: TypeAlias = Callable[[int, Mapping[str, float]], None]


@dataclass(frozen=True)
class PolicyBatch:
    """What the loss needs besides the policy. advantages: (N, T) or (N, 1). Both log-probabilities:
    (N, T); those of the reference model are None where beta is 0.
    """

    rollout: Rollout
    advantages: Tensor
    old_logprobs: Tensor
    reference_logprobs: Tensor | None = None

    def select(self, index: Tensor) -> PolicyBatch:
        """Only these samples."""
        r = self.rollout
        return PolicyBatch(
            Rollout(r.prompt_ids[index], r.prompt_mask[index], r.ids[index], r.mask[index]),
            self.advantages[index],
            self.old_logprobs[index],
            None if self.reference_logprobs is None else self.reference_logprobs[index],
        )


def train_policy(
    policy: LanguageModel,
    generate: GenerateStep,
    config: GrpoConfig,
    *,
    folder: Path,
    seed: int,
    log: Log | None = None,
) -> LanguageModel:
    """Train `policy` in place, from the checkpoint in `folder` if there is one; the trained model
    is in `folder` at the end.

    `generate` must return the same for the same step, from its journal where a step was sampled
    before: then a run that was killed goes on as if it had not been interrupted. `folder` holds the
    model (safetensors), the optimiser's state and `state.json`.
    """
    reference = _load_reference(policy, config)
    optimiser = torch.optim.AdamW(
        policy.model.parameters(), lr=config.learning_rate, weight_decay=0.0, betas=(0.9, 0.95)
    )
    # After the optimiser is built: its moments are loaded into its parameter groups.
    first_step = _restore_checkpoint(policy, optimiser, folder)
    for step in range(first_step, config.steps):
        generation = generate(policy, step)
        # The budget may end between two regular checkpoints; without this one the last steps would
        # be lost, and a resumed run would repeat them with other data.
        if generation is None:
            _save_checkpoint(policy, optimiser, folder, step)
            break
        metrics = _update_policy(
            # The order of minibatches follows from seed and step alone, so a resumed run draws the
            # same. The prime keeps the steps of neighbouring seeds apart.
            policy,
            reference,
            optimiser,
            generation,
            config,
            seed=seed * 1_000_003 + step,
        )
        # Saved before the step is logged: after a kill in between the step is not logged, after one
        # before the save it is logged again, which readers of the log expect.
        if (step + 1) % config.save_every == 0 or step + 1 == config.steps:
            _save_checkpoint(policy, optimiser, folder, step + 1)
        if log is not None:
            log(step, {**generation.metrics, **metrics})
    return policy


def _update_policy(
    policy: LanguageModel,
    reference: Any,
    optimiser: torch.optim.Optimizer,
    generation: Generation,
    config: GrpoConfig,
    *,
    seed: int,
) -> dict[str, float]:
    """Take several epochs of gradient steps on one generation. Returns the mean loss, and the
    entropy before the steps, in nats a token.
    """
    rollout = generation.rollout
    token_advantages = compute_token_advantages(generation, config).to(policy.device)
    # pi_old, at the weights that sampled, is computed before the first gradient step. The journal
    # keeps tokens only, and the sampler with its key-value cache rounds differently from this
    # forward pass.
    with torch.no_grad():
        old_logprobs, _ = compute_token_logprobs(policy.model, rollout, config.temperature)
        reference_logprobs = (
            None
            if reference is None
            else compute_token_logprobs(reference, rollout, config.temperature)[0]
        )
    batch = PolicyBatch(rollout, token_advantages, old_logprobs, reference_logprobs)
    losses: list[float] = []
    entropies: list[float] = []
    # From the second minibatch on the weights differ from pi_old, and the clip of the ratio acts.
    for index in _draw_minibatches(len(rollout), config, seed):
        minibatch = batch.select(index.to(policy.device))
        mask = minibatch.rollout.mask
        logprobs, token_entropy = compute_token_logprobs(
            policy.model, minibatch.rollout, config.temperature
        )
        # Padding after the end token is no choice of the policy. clamp: a batch of empty
        # completions must not divide by 0.
        entropy = (token_entropy * mask).sum() / mask.sum().clamp(min=1)
        loss = grpo_loss(logprobs, minibatch, config)
        if config.entropy:
            loss = loss - config.entropy * entropy
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        # A lone winner in a group has the advantage (G - 1) / sqrt(G), 2.47 for G = 8, with or
        # without smoothing; the norm bounds what one such step can do to the weights.
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), config.max_norm)
        optimiser.step()
        losses.append(loss.item())
        entropies.append(entropy.item())
    # Entropy of the first minibatch: that of the policy which sampled, before any update.
    return {"loss": sum(losses) / len(losses), "entropy": entropies[0]}


def grpo_loss(logprobs: Tensor, batch: PolicyBatch, config: GrpoConfig) -> Tensor:
    """The scalar to minimise: the mean over samples of the mean over a sample's tokens.

    TRL's `loss_type="grpo"` with `use_bias_correction_kl=False`: the divergence is weighted by beta
    alone, as in the paper.
    """
    mask = batch.rollout.mask
    ratio = (logprobs - batch.old_logprobs).exp()
    clipped_ratio = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    # The minimum is the pessimistic bound of PPO: for a negative advantage the unclipped term still
    # counts where the ratio has moved the wrong way.
    token_loss = -torch.minimum(ratio * batch.advantages, clipped_ratio * batch.advantages)
    if config.beta:
        # Without this the divergence would silently be left out of the loss.
        if batch.reference_logprobs is None:
            raise ValueError(
                "beta is above 0, but the batch has no log-probabilities of the reference model"
            )
        log_ratio = batch.reference_logprobs - logprobs
        # Schulman's estimator k3: unbiased, and never negative for a single token
        token_loss = token_loss + config.beta * (log_ratio.exp() - log_ratio - 1)
    # First over a sample's tokens, then over samples, as in the paper: TRL's default ("dapo")
    # divides by the tokens of the whole batch, so that long completions weigh more.
    return ((token_loss * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def compute_advantages(rewards: Tensor, config: GrpoConfig) -> Tensor:
    """(N,) rewards to (N,) advantages, standardised inside each group by the sample standard
    deviation plus 1e-4, as TRL does.
    """
    groups = rewards.view(-1, config.group)
    # Gains are already differences within the group, so they are divided by the deviation only;
    # subtracting their mean would punish samples that do not raise the best.
    if config.objective == "max@k":
        gains = _compute_best_of_k_gains(groups, config.best_of)
        return (gains / (groups.std(1, keepdim=True) + 1e-4)).reshape(-1)
    return torch.tensor(
        [
            advantage
            for group in groups.tolist()
            for advantage in standardize_group(group, config.smoothing)
        ]
    )


def compute_token_advantages(generation: Generation, config: GrpoConfig) -> Tensor:
    """(N, 1), or (N, T) with split credit: tokens of the plan are credited with the correctness of
    the program, tokens of the program with its reward (as in TritonRL, arXiv 2510.17891).
    """
    reward_advantages = compute_advantages(generation.rewards, config).unsqueeze(1)
    if config.credit == "whole":
        return reward_advantages
    if generation.is_correct is None or generation.program_mask is None:
        raise ValueError(
            "split credit needs to know which samples are right, and which tokens are of the program"
        )
    # Speed is decided by the program's tokens. Crediting the analysis with it would reinforce words
    # that happened to stand before a fast program.
    plan_advantages = compute_advantages(generation.is_correct, config).unsqueeze(1)
    return torch.where(generation.program_mask.cpu() > 0, reward_advantages, plan_advantages)


def _compute_best_of_k_gains(groups: Tensor, k: int) -> Tensor:
    """How much each member raises the expected best of k: E[max(0, r_i - best of k - 1 others)]
    over draws without replacement.
    """
    gains = torch.empty_like(groups)
    members = groups.shape[1]
    # The probability that the j-th smallest of the other members is the best of a draw of k - 1 of
    # them. Exact, by counting subsets: noise of an estimate from random draws would come on top of
    # that of the measurement.
    probabilities = torch.tensor(
        [math.comb(j, k - 2) / math.comb(members - 1, k - 1) for j in range(members - 1)]
    )
    for i in range(members):
        other_rewards = torch.cat([groups[:, :i], groups[:, i + 1 :]], 1).sort(1).values
        differences = groups[:, i : i + 1] - other_rewards
        gains[:, i] = (differences.clamp(min=0) * probabilities).sum(1)
    return gains


def _draw_minibatches(size: int, config: GrpoConfig, seed: int) -> Iterator[Tensor]:
    random = torch.Generator().manual_seed(seed)
    for _ in range(config.epochs):
        yield from torch.randperm(size, generator=random).chunk(config.minibatches)


def _load_reference(policy: LanguageModel, config: GrpoConfig) -> Any:
    """Load a frozen copy of the starting model where beta is above 0, else return None."""
    if not config.beta:
        return None
    # read from its folder, as TRL does
    path = Path(policy.name)
    # A copy from the folder of the starting model: `policy` is trained in place, and after a
    # restart it already holds trained weights.
    return LanguageModel.load(
        path if path.is_dir() else policy.name, device=str(policy.device)
    ).model.requires_grad_(False)


def _save_checkpoint(
    policy: LanguageModel, optimiser: torch.optim.Optimizer, folder: Path, steps: int
) -> None:
    # safetensors stores flat, contiguous tensors under one name each, and loading it runs no code,
    # where a pickled optimiser would.
    moments = {
        f"{name}.{i}": value.contiguous()
        for i, state in optimiser.state_dict()["state"].items()
        for name, value in state.items()
    }
    # The folder is replaced as a whole: model, moments and step count of different steps would
    # resume a run that never existed.
    with replace_folder(folder) as new_folder:
        policy.model.save_pretrained(new_folder, safe_serialization=True)
        policy.tokenizer.save_pretrained(new_folder)
        save_file(moments, new_folder / "optimiser.safetensors")
        (new_folder / "state.json").write_text(json.dumps({"steps": steps}), encoding="utf-8")


def _restore_checkpoint(
    policy: LanguageModel, optimiser: torch.optim.Optimizer, folder: Path
) -> int:
    """Load model and optimiser of the last checkpoint. Returns the number of steps it was trained
    for, 0 without a checkpoint.
    """
    # A kill in the middle of a replacement leaves the earlier folder aside; it is put back first. A
    # folder without state.json is a model, but no checkpoint of this loop.
    if not recover_folder(folder) or not (folder / "state.json").is_file():
        return 0
    checkpoint = LanguageModel.load(folder, device=str(policy.device))
    # Into the existing parameters: the optimiser holds references to them.
    policy.model.load_state_dict(checkpoint.model.state_dict())
    moments = load_file(folder / "optimiser.safetensors", device=str(policy.device))
    optimiser_state = optimiser.state_dict()
    for key, value in moments.items():
        name, _, i = key.rpartition(".")
        optimiser_state["state"].setdefault(int(i), {})[name] = value
    # Without the moments the first steps after a restart are larger than those of a run that was
    # not interrupted, and the results of the two differ.
    optimiser.load_state_dict(optimiser_state)
    return int(json.loads((folder / "state.json").read_text(encoding="utf-8"))["steps"])
