"""The generator of cheats of the red-team experiment; the whole of it runs in `test_command`."""

from __future__ import annotations

from dataclasses import replace

from torch_cudal1.training.environment import load_naive_environment
from torch_cudal1.training.experiments.demo_plan import DEMO
from torch_cudal1.training.experiments.red_team import CheatGenerator


def test_it_writes_nothing_but_cheats_and_the_same_ones_for_the_same_seed():
    environment = load_naive_environment(replace(DEMO, train_tasks=3), 0)
    generator = CheatGenerator(environment)
    prompts = [environment.codec.prompt(task) for task in environment.train]
    groups = generator.sample(prompts, count=20, temperature=1.0, seed=0)
    assert groups == generator.sample(prompts, count=20, temperature=1.0, seed=0)
    assert groups != generator.sample(prompts, count=20, temperature=1.0, seed=1)
    for task, group in zip(environment.train, groups, strict=True):
        cheats = {program.text for program in environment.codec.programs(task) if program.hack}
        assert set(group) <= cheats
        assert len(set(group)) > 1
