"""One step of contrastive reinforcement learning before its gradient: draw exemplars, sample, measure, smooth.

Each group has one prompt, so one draw of exemplars, from the database as it stood before the step. Nothing is learned here: that is
`rl_native`'s, and `recorder` sees to it that a step is paid for once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from torch_cudal1.training.model import Writer
from torch_cudal1.training.recorder import Recorder, Shown, facts_of, turn
from torch_cudal1.training.reward import RewardKind, reward_of
from torch_cudal1.training.rl_native import Generation, GrpoConfig
from torch_cudal1.training.selectors import Nothing, Selector, exemplars
from torch_cudal1.training.smoothing import Moments, smooth

__all__ = ["ContrastiveStep"]


@dataclass
class ContrastiveStep:
    """A `rl_native.Gather`. `shuffled`: exemplars in an order that tells nothing, for comparison."""

    recorder: Recorder
    config: GrpoConfig
    selector: Selector = field(default_factory=Nothing)
    reward: RewardKind = "speedup"
    shuffled: bool = False

    def __post_init__(self) -> None:
        if not self.recorder.tasks:
            raise ValueError("expected at least one task to train on")
        self._moments, self._before = Moments(), 0

    def __call__(self, writer: Writer, step: int) -> Generation:
        """The samples of a step with their smoothed rewards."""
        config = self.config
        drawn = self.drawn(step)
        found = self.recorder.sampled(writer, str(step), drawn, count=config.group, temperature=config.temperature)
        rewards = [reward_of(one, self.reward) for one in found.measured]
        groups = [rewards[i : i + config.group] for i in range(0, len(rewards), config.group)]
        smoothed, self._moments = smooth(groups, config.smoothing, self._moments_before(step))
        self._before = step + 1
        return Generation(found.rollout, torch.tensor([each for group in smoothed for each in group]), facts_of(found.measured))

    def drawn(self, step: int) -> list[Shown]:
        """The step's tasks with their exemplars: one draw a group."""
        recorder, view = self.recorder, self.recorder.view()
        seed = recorder.seed * 1_000_003 + step
        return [
            Shown(task, exemplars(self.selector, seed, task.id, view, shuffled=self.shuffled))
            for task in turn(recorder.tasks, self.config.groups, step, recorder.seed)
        ]

    def _moments_before(self, step: int) -> Moments:
        """Of all rewards of earlier steps. After a restart they are read from the database: they are not in a checkpoint."""
        if self._before == step:
            return self._moments
        moments = Moments()
        for earlier in range(step):
            known = self.recorder.on_record(str(earlier), prompts=self.config.groups, count=self.config.group)
            moments = moments.with_rewards(reward_of(one, self.reward) for one in known)
        return moments
