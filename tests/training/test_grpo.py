"""The native loop: its advantages by hand, its loss against TRL's, and going on after a kill."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch

from torch_cudal1.core.errors import SettingError
from torch_cudal1.ingest.llm.policy import (
    LanguageModel,
    Rollout,
    TinySpec,
    compute_token_logprobs,
    create_tiny,
)
from torch_cudal1.training.grpo import (
    Generation,
    GrpoConfig,
    PolicyBatch,
    compute_advantages,
    compute_token_advantages,
    grpo_loss,
    train_policy,
)
from torch_cudal1.training.smoothing import Smoothing

WORDS = tuple("abcdefgh")
PROMPTS = ("a b c", "d", "e f", "g h a b c")
CONFIG = GrpoConfig(steps=4, group=4, groups=4, epochs=2, learning_rate=3e-3, save_every=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_tiny(
        tmp_path_factory.mktemp("model") / "tiny",
        WORDS,
        TinySpec(hidden=32, layers=2, heads=2, context=64),
    )


pytestmark = pytest.mark.usefixtures("one_thread")


def writer(folder: Path) -> LanguageModel:
    return LanguageModel.load(folder, max_new_tokens=6)


def a_batch(folder: Path, *, shift: float) -> PolicyBatch:
    """Samples of one policy with old and reference log-probabilities of others, so that every term
    of the loss counts.
    """
    rollout = writer(folder).rollout(PROMPTS, count=4, temperature=1.0, seed=3)
    torch.manual_seed(5)
    shape = rollout.ids.shape
    with torch.no_grad():
        policy_logprobs = compute_token_logprobs(writer(folder).model, rollout, 1.0)[0]
    return PolicyBatch(
        rollout,
        torch.randn(len(rollout), 1),
        policy_logprobs + shift * torch.randn(shape),
        policy_logprobs + shift * torch.randn(shape),
    )


def gather_letter_rewards(model: LanguageModel, step: int) -> Generation:
    """Rewards the letter "a": a world small enough to be learned in a few steps."""
    rollout = model.rollout(PROMPTS, count=4, temperature=1.0, seed=step)
    letter_id = model.tokenizer.convert_tokens_to_ids("a")
    rewards = ((rollout.ids == letter_id) * rollout.mask).sum(1).float()
    return Generation(rollout, rewards, {"reward": rewards.mean().item()})


def test_advantages_are_standardised_inside_each_group():
    rewards = torch.tensor([0.0, 0.0, 0.0, 1.0, 5.0, 5.0, 5.0, 5.0])
    advantages = compute_advantages(rewards, replace(CONFIG, groups=2))
    expected = 0.75 / (0.5 + 1e-4)
    assert advantages[3] == pytest.approx(expected)
    assert advantages[:3].tolist() == pytest.approx([-expected / 3] * 3)
    assert advantages[4:].tolist() == [0.0] * 4, "a group of equals teaches nothing"


def test_with_split_credit_a_plan_is_credited_with_being_right_and_a_program_with_its_reward(
    folder,
):
    model = writer(folder)
    rollout = model.rollout(PROMPTS[:1], count=4, temperature=1.0, seed=3)
    rewards, right = torch.tensor([0.0, 1.0, 2.0, 5.0]), torch.tensor([0.0, 1.0, 1.0, 1.0])
    program = torch.zeros_like(rollout.ids)
    program[:, 1:] = rollout.mask[:, 1:]
    config = replace(CONFIG, groups=1, group=4, credit="split")
    token_advantages = compute_token_advantages(
        Generation(rollout, rewards, {}, right, program), config
    )
    assert token_advantages.shape == rollout.ids.shape
    assert token_advantages[:, 0].tolist() == pytest.approx(
        compute_advantages(right, config).tolist()
    )
    assert token_advantages[1:, 0].unique().numel() == 1, (
        "right programs have equal plans, however fast they are"
    )
    group_advantages = compute_advantages(rewards, config)
    for row, mask, advantage in zip(token_advantages, program, group_advantages, strict=True):
        assert row[mask > 0].tolist() == pytest.approx([float(advantage)] * int(mask.sum()))
    with pytest.raises(ValueError, match="split credit"):
        compute_token_advantages(Generation(rollout, rewards, {}), config)
    assert torch.equal(
        compute_token_advantages(Generation(rollout, rewards, {}), replace(config, credit="whole")),
        group_advantages.unsqueeze(1),
    )


def test_tokens_behind_a_marker_are_found_in_every_completion(folder):
    model = writer(folder)
    words = [model.tokenizer.convert_tokens_to_ids(word) for word in ("a", "b", "c")]
    a, b, c = words
    rollout = model.rebuilt(PROMPTS[:1], [[a, b, c, a], [c, c], [b, a]])
    assert model.after(rollout, "b").tolist() == [[0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 0, 0]]


def test_a_lone_winner_is_bounded_only_by_the_clip_after_standardisation():
    rewards = torch.tensor([0.0] * 7 + [1.0])
    free = compute_advantages(rewards, GrpoConfig(groups=1))
    assert free[-1] == pytest.approx(7 / math.sqrt(8), rel=1e-3)
    assert (
        compute_advantages(rewards, GrpoConfig(groups=1, smoothing=Smoothing(clip_advantage=1.5)))[
            -1
        ]
        == 1.5
    )


def test_best_of_k_gains_are_those_of_every_draw():
    rewards = torch.tensor([0.3, 2.0, 0.0, 1.0, 1.5])
    config = GrpoConfig(group=5, groups=1, best_of=3, objective="max@k")
    for i, advantage in enumerate(compute_advantages(rewards, config).tolist()):
        other_rewards = [rewards[j].item() for j in range(5) if j != i]
        draws = [max(0.0, rewards[i].item() - max(pair)) for pair in combinations(other_rewards, 2)]
        assert advantage == pytest.approx(
            sum(draws) / len(draws) / (rewards.std().item() + 1e-4), rel=1e-5
        )


def test_the_mean_of_the_best_of_k_gradient_points_to_the_winner():
    advantages = compute_advantages(
        torch.tensor([0.0, 0.0, 0.9, 1.0]),
        GrpoConfig(group=4, groups=1, best_of=4, objective="max@k"),
    )
    assert advantages[:3].tolist() == [0.0] * 3
    assert advantages[3] > 0


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_loss_is_trls_loss_on_the_same_batch(folder, tmp_path, beta, temperature):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    config = replace(CONFIG, beta=beta, temperature=temperature)
    batch = a_batch(folder, shift=0.3)
    options = {
        "loss_type": "grpo",
        "use_bias_correction_kl": False,
        "beta": beta,
        "temperature": temperature,
        "num_generations": 4,
    }
    machine = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}
    arguments = trl.GRPOConfig(
        str(tmp_path), per_device_train_batch_size=16, max_completion_length=6, **options, **machine
    )
    trainer = trl.GRPOTrainer(
        model=str(folder),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": p} for p in PROMPTS * 4]),
        processing_class=writer(folder).tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    r = batch.rollout
    inputs = {
        "prompt_ids": r.prompt_ids,
        "prompt_mask": r.prompt_mask,
        "completion_ids": r.ids,
        "completion_mask": r.mask,
    }
    inputs |= {
        "advantages": batch.advantages.squeeze(1),
        "old_per_token_logps": batch.old_logprobs,
        "num_items_in_batch": r.mask.sum(),
    }
    inputs |= {"ref_per_token_logps": batch.reference_logprobs}
    trainer.model.eval()
    trl_loss = trainer._compute_loss(trainer.model, inputs)
    model = writer(folder).model
    loss = grpo_loss(compute_token_logprobs(model, r, temperature)[0], batch, config)
    assert abs(trl_loss.item()) > 1e-3, "the batch must not be trivial"
    assert loss.item() == pytest.approx(trl_loss.item(), abs=1e-5)
    trl_loss.backward()
    loss.backward()
    for mine, his in zip(model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, his.grad, atol=1e-5, rtol=1e-4)


def test_rewards_rise(folder, tmp_path):
    mean_rewards: list[float] = []
    config = replace(CONFIG, steps=25, save_every=25)
    train_policy(
        writer(folder),
        gather_letter_rewards,
        config,
        folder=tmp_path / "rl",
        seed=0,
        log=lambda _, facts: mean_rewards.append(facts["reward"]),
    )
    assert sum(mean_rewards[-5:]) / 5 > sum(mean_rewards[:5]) / 5 + 1


def test_a_run_that_was_killed_ends_as_if_it_had_not_been(folder, tmp_path):
    uninterrupted = train_policy(
        writer(folder), gather_letter_rewards, CONFIG, folder=tmp_path / "whole", seed=0
    )

    def stop_at_step_three(model: LanguageModel, step: int) -> Generation:
        if step == 3:
            raise KeyboardInterrupt
        return gather_letter_rewards(model, step)

    with pytest.raises(KeyboardInterrupt):
        train_policy(writer(folder), stop_at_step_three, CONFIG, folder=tmp_path / "cut", seed=0)
    resumed = train_policy(
        writer(folder), gather_letter_rewards, CONFIG, folder=tmp_path / "cut", seed=0
    )
    for parameter, resumed_parameter in zip(
        uninterrupted.model.parameters(), resumed.model.parameters(), strict=True
    ):
        assert torch.equal(parameter, resumed_parameter)


def test_a_model_is_only_pulled_away_as_far_as_beta_lets_it(folder, tmp_path):
    start = writer(folder).model.state_dict()

    def measure_distance(beta: float) -> float:
        config = replace(CONFIG, steps=8, beta=beta, save_every=8)
        model = train_policy(
            writer(folder), gather_letter_rewards, config, folder=tmp_path / f"beta{beta}", seed=0
        ).model
        return sum(
            (value - start[name]).square().sum().item()
            for name, value in model.state_dict().items()
        )

    assert measure_distance(5.0) < 0.7 * measure_distance(0.0)


def test_the_divergence_needs_a_reference(folder):
    batch = a_batch(folder, shift=0.0)
    with pytest.raises(ValueError, match="reference"):
        grpo_loss(
            batch.old_logprobs, replace(batch, reference_logprobs=None), replace(CONFIG, beta=0.1)
        )


@pytest.mark.parametrize(
    "wrong",
    [
        {"group": 1},
        {"steps": 0},
        {"beta": -0.1},
        {"clip_low": 1.5},
        {"best_of": 9},
        {"minibatches": 7},
        {"max_norm": 0.0},
    ],
)
def test_numbers_that_cannot_be_meant_are_refused_by_name(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong)).split("_")[0]):
        GrpoConfig(**wrong)


def test_rows_of_a_batch_keep_their_samples_together(folder):
    batch = a_batch(folder, shift=0.1)
    part = batch.select(torch.tensor([5, 2]))
    assert isinstance(part.rollout, Rollout)
    assert torch.equal(part.old_logprobs, batch.old_logprobs[[5, 2]])
    assert torch.equal(part.rollout.ids, batch.rollout.ids[[5, 2]])
