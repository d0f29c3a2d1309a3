"""Contrastive rollouts: one step of CUDA-L1's stage 3 before its gradient (paper, section 2.4).

    draw exemplars -> sample a group of completions -> measure -> reward -> smooth

Every member of a group has the same prompt, so a group has one draw of exemplars, from the database
as it stood before the step. `grpo` learns from what comes back; `recorder` sees to it that a step
that was interrupted is not measured twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torch_cudal1.ingest.llm.policy import LanguageModel
from torch_cudal1.ingest.llm.reward import RewardKind, compute_reward
from torch_cudal1.ingest.llm.selectors import Nothing, Selector, select_exemplars
from torch_cudal1.judge.pool.measured import Measured
from torch_cudal1.training.grpo import Generation, GrpoConfig
from torch_cudal1.training.recorder import Recorder, TaskPrompt, choose_tasks, summarize_outcomes
from torch_cudal1.training.smoothing import Moments, smooth_rewards

__all__ = ["ContrastiveStep"]


@dataclass
class ContrastiveStep:
    """A `grpo.GenerateStep`: called with a policy and a step number, it returns the step's samples
    with their rewards.

    `shuffled`: exemplars in random order instead of worst to best, for comparison. `budget`: no
    step begins once so many different (task, program) pairs were measured; an arm whose policy
    repeats itself may therefore sample more.
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
        self._moments, self._next_step = Moments(), 0
        self._programs_seen: set[tuple[str, str]] = set()

    def __call__(self, policy: LanguageModel, step: int) -> Generation | None:
        """The samples of a step with their smoothed rewards; None where the budget is spent."""
        config = self.config
        # Before the budget is looked at: after a restart the programs of earlier steps count as
        # spent.
        self._restore_history(step)
        # Arms are compared at equal numbers of different measured programs, not of samples: a
        # repeated program costs no measurement.
        if self.budget is not None and self.programs_spent >= self.budget:
            return None
        batch = self.recorder.sample(
            policy,
            str(step),
            self.draw_prompts(step),
            count=config.group,
            temperature=config.temperature,
        )
        rewards = [compute_reward(measurement, self.reward) for measurement in batch.measurements]
        # Members of a group are next to each other in the batch. The pool of the smoothing must be
        # wider than a group: with the group as its own pool, standardising undoes the clip.
        groups = [rewards[i : i + config.group] for i in range(0, len(rewards), config.group)]
        # The moments are replaced only after the step is measured and on record; a kill before that
        # leaves them to be restored.
        smoothed, self._moments = smooth_rewards(groups, config.smoothing, self._moments)
        self._next_step = step + 1
        self._count_programs(batch.measurements)
        metrics = {
            **summarize_outcomes(batch.measurements),
            "spent": float(self.programs_spent),
        }
        # A failure's reward is 0 (`compute_reward`). Its score stays absent everywhere else, so that no
        # mean takes a failure for a slow program.
        flat_rewards = torch.tensor([reward for group in smoothed for reward in group])
        if config.credit == "whole":
            return Generation(batch.rollout, flat_rewards, metrics)
        is_correct = torch.tensor(
            [float(measurement.score is not None) for measurement in batch.measurements]
        )
        # Tokens behind the codec's marker are the program, tokens before it the analysis.
        program_mask = policy.after(batch.rollout, self.recorder.appraiser.codec.marker)
        return Generation(batch.rollout, flat_rewards, metrics, is_correct, program_mask)

    @property
    def programs_spent(self) -> int:
        """How many different programs were measured. A completion that is no program costs nothing."""
        return len(self._programs_seen)

    def draw_prompts(self, step: int) -> list[TaskPrompt]:
        """The step's tasks with their exemplars: one draw for each group."""
        # The view is of the last commit. Samples of this step are not in it, whatever is being
        # measured.
        recorder, view = self.recorder, self.recorder.view()
        # Exemplars are drawn anew in each step, also where the database did not change. The prime
        # keeps the steps of neighbouring seeds apart.
        seed = recorder.seed * 1_000_003 + step
        return [
            # A prompt for each group, not for each sample: GRPO's baseline is the mean of samples
            # of one prompt.
            TaskPrompt(
                task, select_exemplars(self.selector, seed, task.id, view, shuffled=self.shuffled)
            )
            for task in choose_tasks(recorder.tasks, self.config.groups, step, recorder.seed)
        ]

    def _count_programs(self, measurements: Sequence[Measured]) -> None:
        self._programs_seen |= {
            (measurement.task, measurement.program)
            for measurement in measurements
            # Text that is no program was never run.
            if measurement.outcome != "undecodable"
        }

    def _restore_history(self, step: int) -> None:
        """Restore the reward moments and the programs of earlier steps from the database after a
        restart. A checkpoint does not hold them.
        """
        # Steps in sequence have their history in memory. Any other step is a restart, or a caller
        # that goes back.
        if self._next_step == step:
            return
        self._moments, self._programs_seen = Moments(), set()
        for earlier_step in range(step):
            measurements = self.recorder.read_measurements(
                str(earlier_step), prompts=self.config.groups, count=self.config.group
            )
            # In the order of steps, as the interrupted run had added them: floating-point sums
            # depend on it.
            self._moments = self._moments.with_rewards(
                compute_reward(measurement, self.reward) for measurement in measurements
            )
            self._count_programs(measurements)
        self._next_step = step
