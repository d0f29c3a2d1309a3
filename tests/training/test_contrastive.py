"""Contrastive reinforcement learning in the synthetic world: exemplars, rewards, and kills."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.stage_cases import CODEC, EVERY, SMALL, recorder, writer
from tests.training.world import TASKS, SyntheticEvaluator
from torch_cudal1.ingest.llm.policy import LanguageModel
from torch_cudal1.ingest.llm.selectors import make_selector
from torch_cudal1.training.contrastive import ContrastiveStep
from torch_cudal1.training.grpo import GrpoConfig, train_policy
from torch_cudal1.training.supervised import SftRow, fine_tune

pytestmark = pytest.mark.usefixtures("one_thread")


RL = GrpoConfig(steps=3, group=4, groups=3, epochs=1, save_every=2)


def run_rl(start: Path, folder: Path, evaluator: SyntheticEvaluator) -> tuple[LanguageModel, int]:
    rl_recorder = recorder(folder, evaluator, "rl")
    try:
        step = ContrastiveStep(rl_recorder, RL, make_selector("bucket"))
        return train_policy(writer(start), step, RL, folder=folder / "rl", seed=0), len(
            rl_recorder.appraiser.database
        )
    finally:
        rl_recorder.appraiser.database.close()


def test_reinforcement_that_was_killed_loses_no_sample_and_counts_none_twice(start, tmp_path):
    taught = writer(start)
    fine_tune(
        taught,
        [SftRow(CODEC.prompt(task), program) for task in TASKS for program in EVERY],
        SMALL,
        seed=0,
    )
    taught.save(tmp_path / "sft")
    uninterrupted, samples = run_rl(tmp_path / "sft", tmp_path / "whole", SyntheticEvaluator())
    questions = []
    for dies_after in (3, 12, 8):
        evaluator = SyntheticEvaluator(dies_after)
        with pytest.raises(KeyboardInterrupt):
            run_rl(tmp_path / "sft", tmp_path / "cut", evaluator)
        questions += evaluator.asked
    evaluator = SyntheticEvaluator()
    resumed, count = run_rl(tmp_path / "sft", tmp_path / "cut", evaluator)
    assert count == samples == 3 * 3 * 4
    assert max((questions + evaluator.asked).count(question) for question in questions) <= 2 + 3, (
        "each death may lose only what it was measuring"
    )
    for parameter, resumed_parameter in zip(
        uninterrupted.model.parameters(), resumed.model.parameters(), strict=True
    ):
        assert torch.equal(parameter, resumed_parameter)


def test_a_group_shares_one_draw_of_exemplars(start, tmp_path):
    rl_recorder = recorder(tmp_path, SyntheticEvaluator(), "rl")
    step = ContrastiveStep(rl_recorder, RL, make_selector("random"))
    model = writer(start)
    fine_tune(
        model,
        [SftRow(CODEC.prompt(task), program) for task in TASKS for program in EVERY],
        SMALL,
        seed=0,
    )
    for number in range(3):
        step(model, number)
    samples = list(rl_recorder.appraiser.database.samples())
    assert any(sample.exemplars for sample in samples)
    for group in range(0, len(samples), RL.group):
        assert len({sample.exemplars for sample in samples[group : group + RL.group]}) == 1
    rl_recorder.appraiser.database.close()


def test_reinforcement_raises_the_speed_up(start, tmp_path):
    model, rl_recorder = (
        writer(start),
        replace(recorder(tmp_path, SyntheticEvaluator(), "rl"), tasks=TASKS[:2]),
    )
    fine_tune(
        model,
        [SftRow(CODEC.prompt(task), program) for task in TASKS for program in EVERY],
        SMALL,
        seed=0,
    )
    config = GrpoConfig(steps=40, group=8, groups=6, epochs=2, learning_rate=1e-3, save_every=40)
    speedups: list[float] = []
    train_policy(
        model,
        ContrastiveStep(rl_recorder, config),
        config,
        folder=tmp_path / "rl",
        seed=0,
        log=lambda _, facts: speedups.append(facts["speedup"]),
    )
    assert sum(speedups[-5:]) / 5 > sum(speedups[:5]) / 5 + 0.3
    rl_recorder.appraiser.database.close()


def test_a_step_with_split_credit_tells_which_samples_are_right_and_trains(start, tmp_path):
    model, rl_recorder = writer(start), recorder(tmp_path, SyntheticEvaluator(), "rl")
    config = replace(RL, credit="split")
    step = ContrastiveStep(rl_recorder, config)
    generation = step(model, 0)
    assert generation is not None
    measurements = rl_recorder.read_measurements("0", prompts=RL.groups, count=RL.group)
    assert generation.is_correct.tolist() == [
        float(measured.score is not None) for measured in measurements
    ]
    assert generation.program_mask.shape == generation.rollout.ids.shape
    train_policy(model, step, config, folder=tmp_path / "rl", seed=0)
    rl_recorder.appraiser.database.close()
