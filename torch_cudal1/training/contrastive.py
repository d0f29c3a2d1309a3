"""One step of contrastive reinforcement learning before its gradient: draw exemplars, sample,
measure, smooth.

Each group has one prompt, so one draw of exemplars, from the database as it stood before the step.
Nothing is learned here: that is `rl_native`'s, and `recorder` sees to it that a step is paid for
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torch_cudal1.ingest.llm.policy import Writer
from torch_cudal1.ingest.llm.reward import RewardKind, reward_of
from torch_cudal1.ingest.llm.selectors import Nothing, Selector, exemplars
from torch_cudal1.judge.pool.measured import Measured
from torch_cudal1.training.recorder import Recorder, Shown, facts_of, turn
from torch_cudal1.training.rl_native import Generation, GrpoConfig
from torch_cudal1.training.smoothing import Moments, smooth

__all__ = ["ContrastiveStep"]


@dataclass
class ContrastiveStep:
    """A `rl_native.Gather`. `shuffled`: exemplars in an order that tells nothing, for comparison.

    `budget`: no step begins once this many different programs of tasks were met; so arms that
    repeat themselves may sample more.
    """

    recorder: Recorder
    config: GrpoConfig
    selector: Selector = field(default_factory=Nothing)
    reward: RewardKind = "speedup"
    shuffled: bool = False
    budget: int | None = None

    def __post_init__(self) -> None:
        if not self.recorder.tasks:
            raise ValueError("expected at least one task to train on")
        self._moments, self._before = Moments(), 0
        self._met: set[tuple[str, str]] = set()

    def __call__(self, writer: Writer, step: int) -> Generation | None:
        """The samples of a step with their smoothed rewards; None where the budget is spent."""
        config = self.config
        self._catch_up(step)
        if self.budget is not None and self.spent >= self.budget:
            return None
        found = self.recorder.sampled(
            writer, str(step), self.drawn(step), count=config.group, temperature=config.temperature
        )
        rewards = [reward_of(one, self.reward) for one in found.measured]
        groups = [rewards[i : i + config.group] for i in range(0, len(rewards), config.group)]
        smoothed, self._moments = smooth(groups, config.smoothing, self._moments)
        self._before = step + 1
        self._meet(found.measured)
        facts = {**facts_of(found.measured), "spent": float(self.spent)}
        flat = torch.tensor([each for group in smoothed for each in group])
        if config.credit == "whole":
            return Generation(found.rollout, flat, facts)
        right = torch.tensor([float(one.score is not None) for one in found.measured])
        return Generation(
            found.rollout,
            flat,
            facts,
            right,
            writer.after(found.rollout, self.recorder.appraiser.codec.marker),
        )

    @property
    def spent(self) -> int:
        """How many different programs were met so far; what was no program costs nothing."""
        return len(self._met)

    def drawn(self, step: int) -> list[Shown]:
        """The step's tasks with their exemplars: one draw a group."""
        recorder, view = self.recorder, self.recorder.view()
        seed = recorder.seed * 1_000_003 + step
        return [
            Shown(task, exemplars(self.selector, seed, task.id, view, shuffled=self.shuffled))
            for task in turn(recorder.tasks, self.config.groups, step, recorder.seed)
        ]

    def _meet(self, measured: Sequence[Measured]) -> None:
        self._met |= {(one.task, one.program) for one in measured if one.outcome != "undecodable"}

    def _catch_up(self, step: int) -> None:
        """What earlier steps left behind is not in a checkpoint: after a restart it is read from
        the database.
        """
        if self._before == step:
            return
        self._moments, self._met = Moments(), set()
        for earlier in range(step):
            known = self.recorder.on_record(
                str(earlier), prompts=self.config.groups, count=self.config.group
            )
            self._moments = self._moments.with_rewards(reward_of(one, self.reward) for one in known)
            self._meet(known)
        self._before = step
