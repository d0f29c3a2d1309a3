"""The production path: TRL's GRPOTrainer with this package's prompts and rewards. LoRA, vLLM
servers and several GPUs are handled by TRL.

Prompts are rendered when a batch is fetched, from the last committed view of the database.
Rendering is a pure function of seed, task and view, so that all members of a group and all ranks
show the same exemplars. The loader fetches one batch ahead, so a view is one generation late. Only
the first rank holds the judge and the database; it measures the completions of all ranks, and the
other ranks mirror its samples.

Launched by `accelerate launch` or `torchrun` for several processes (FSDP, DeepSpeed ZeRO), and
directly for one. It was run with a small model only: on the CPU, with and without LoRA, in one
process and in two; on two GPUs under FSDP, with and without LoRA, and under DeepSpeed ZeRO-3 with
offload. vLLM servers are configured here and were not run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from torch_cudal1.core.errors import SettingError
from torch_cudal1.ingest.llm.appraise import Appraiser, NamedCompletion
from torch_cudal1.ingest.llm.database import Database, StoredSample, digest
from torch_cudal1.ingest.llm.extras import require_extra
from torch_cudal1.ingest.llm.reward import compute_reward
from torch_cudal1.ingest.llm.selectors import select_exemplars
from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.training.contrastive import ContrastiveStep
from torch_cudal1.training.grpo import GrpoConfig
from torch_cudal1.training.recorder import summarize_outcomes
from torch_cudal1.training.smoothing import Moments, smooth_rewards

__all__ = ["TrlConfig", "build_trl_config", "train_with_trl"]

# rewards, metrics, what was put on record
Measurements: TypeAlias = tuple[list[float], Mapping[str, float], list[StoredSample]]


@dataclass(frozen=True, kw_only=True)
class TrlConfig:
    """What TRL has in addition. `lora_rank`: 0 trains all weights. `vllm_server`: URL of `trl
    vllm-serve`; "" samples in the training processes.
    """

    max_new_tokens: int = 1024
    lora_rank: int = 0
    vllm_server: str = ""
    bf16: bool = False
    cpu: bool = False
    checkpointing: bool = False
    processes: int = 1


def build_trl_config(config: GrpoConfig, trl: TrlConfig, *, folder: Path, seed: int) -> Any:
    """Translate the settings into TRL's GRPOConfig. Raises SettingError for settings that TRL has
    no equivalent of.
    """
    _refuse_native_only(config)
    batch = _count_process_samples(config, trl.processes)
    config_class = require_extra("trl").GRPOConfig
    options: dict[str, Any] = (
        {"vllm_mode": "server", "vllm_server_base_url": trl.vllm_server} if trl.vllm_server else {}
    )
    options[_get_checkpointing_option(config_class)] = trl.checkpointing
    return config_class(
        output_dir=str(folder),
        # The paper's mean over a sample's tokens. TRL 1.16 has "dapo" as its default, a mean over
        # all tokens of the batch.
        loss_type="grpo",
        # With the correction the divergence is multiplied by the ratio rho; the paper weighs it by
        # beta alone.
        use_bias_correction_kl=False,
        scale_rewards="group",
        beta=config.beta,
        epsilon=config.clip_low,
        epsilon_high=config.clip_high,
        entropy_coef=config.entropy,
        num_generations=config.group,
        # TRL counts optimiser steps, the native loop counts generations: `max_steps` below is the
        # product of generations, epochs and minibatches.
        num_iterations=config.epochs,
        steps_per_generation=config.minibatches,
        per_device_train_batch_size=batch,
        max_steps=config.steps * config.epochs * config.minibatches,
        learning_rate=config.learning_rate,
        # TRL's default decays to 0 over the run, the native loop does not; arms and loops must be
        # comparable.
        lr_scheduler_type="constant",
        max_grad_norm=config.max_norm,
        temperature=config.temperature,
        max_completion_length=trl.max_new_tokens,
        bf16=trl.bf16,
        use_cpu=trl.cpu,
        use_vllm=bool(trl.vllm_server),
        # A worker process would hold a stale copy of the database.
        dataloader_num_workers=0,
        # transformers drops the columns that the model's forward does not name, and the reward
        # function needs `task` and `exemplars`.
        remove_unused_columns=False,
        save_steps=config.save_every,
        # A kill while the newest checkpoint is written leaves the one before it.
        save_total_limit=2,
        logging_steps=1,
        # transformers 4 reports to every tracker that is installed unless it is switched off; a run
        # sends nothing anywhere.
        report_to="none",
        seed=seed,
        **options,
    )


def _refuse_native_only(config: GrpoConfig) -> None:
    """Raises SettingError for settings that TRL would drop."""
    # A run must not be reported with an objective that it did not use.
    if config.objective != "mean":
        raise SettingError(
            "objective", config.objective, "'mean' with TRL; max@k is the native loop's"
        )
    if config.smoothing.clip_advantage is not None:
        raise SettingError(
            "clip_advantage",
            config.smoothing.clip_advantage,
            "None with TRL; the native loop has it",
        )


def _count_process_samples(config: GrpoConfig, processes: int) -> int:
    """Samples of one process in a minibatch. Raises SettingError where they do not come out even."""
    # TRL takes samples per process and minibatch: rounding would change the number of samples of a
    # step.
    samples = config.group * config.groups
    if samples % (processes * config.minibatches):
        raise SettingError(
            "group x groups",
            samples,
            f"a multiple of {processes} processes times {config.minibatches} minibatches",
        )
    return samples // processes // config.minibatches


def _get_checkpointing_option(config_class: type) -> str:
    """The name of the option for activation checkpointing in the installed transformers. Versions
    up to 5.17 at least know the older name only.
    """
    # By the field's presence, not by version: TRL passes on what the installed transformers
    # declares. transformers 5.17 refused the newer name, found in the first launch of FSDP on two
    # H200s.
    names = {field.name for field in dataclasses.fields(config_class)}
    return (
        "activation_checkpointing"
        if "activation_checkpointing" in names
        else "gradient_checkpointing"
    )


def train_with_trl(
    model: Path | str, step: ContrastiveStep, trl: TrlConfig, *, folder: Path
) -> list[Mapping[str, Any]]:
    """Train the model at a path (or Hub name) into `folder`/model, from the last checkpoint if
    there is one. Returns TRL's log.

    The path is also the reference where beta is above 0, so it must hold the model of stage 2.
    """
    library, transformers, datasets = (
        require_extra("trl"),
        require_extra("transformers"),
        require_extra("datasets"),
    )
    # first of all: making the arguments joins the other processes, if there are any
    training_arguments = build_trl_config(step.config, trl, folder=folder, seed=step.recorder.seed)
    # Its constructor broadcasts, so it needs the process group that the arguments have just joined.
    prompt_source = PromptSource(step)
    # Rows hold task ids only. Prompts change with the database, so they are rendered when a batch
    # is fetched (`with_transform`), not stored.
    tasks = datasets.Dataset.from_list([{"task": task.id} for task in step.recorder.tasks])
    trainer = library.GRPOTrainer(
        model=str(model),
        reward_funcs=SpeedupReward(step, prompt_source),
        args=training_arguments,
        train_dataset=tasks.with_transform(prompt_source.render),
        # Padding on the left: all prompts of a batch end at the same place, where sampling begins.
        processing_class=transformers.AutoTokenizer.from_pretrained(model, padding_side="left"),
        peft_config=_make_lora_config(trl.lora_rank) if trl.lora_rank else None,
    )
    # `resume_from_checkpoint=True` raises where there is no checkpoint, as in a run that was killed
    # before its first.
    has_checkpoint = any(path.is_dir() for path in folder.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=has_checkpoint or None)
    # Collective under FSDP and ZeRO: every rank calls it, and the weights are gathered.
    trainer.save_model(str(folder / "model"))
    return list(trainer.state.log_history)


class PromptSource:
    """Renders prompts from the last committed view of the database, or, on ranks without the
    database, from a mirror of it.
    """

    def __init__(self, step: ContrastiveStep) -> None:
        self._step = step
        self._tasks = {task.id: task for task in step.recorder.tasks}
        database = step.recorder.appraiser.database
        # The journal has one writer: a second process that opened it would be refused by its lock.
        self._database = database if _get_rank() == 0 else Database(None)
        # A resumed run has samples already: mirrors begin with what the first rank's journal holds,
        # or the ranks would draw different exemplars.
        self.add_samples(
            _broadcast_from_first(list(database.samples()) if _get_rank() == 0 else [])
        )

    def __getstate__(self) -> dict[str, Any]:
        """The state from which `datasets` computes its fingerprint. It is never unpickled."""
        # `datasets` pickles the transform to compute a fingerprint. The whole object holds an open
        # database, a judge and its processes, none of which can be pickled.
        return {"seed": self._step.recorder.seed, "tasks": tuple(self._tasks)}

    def render(self, rows: Mapping[str, Sequence[str]]) -> dict[str, list[Any]]:
        """A batch of the data set: prompts, with their exemplars in columns beside them. No side
        effects, since TRL may render more batches than it uses.
        """
        # One view for the whole batch, so that all groups of it are drawn from the same generation.
        step, view = self._step, self._database.view()
        prompts, digests = [], []
        for task in rows["task"]:
            drawn = select_exemplars(
                step.selector, step.recorder.seed, task, view, shuffled=step.shuffled
            )
            content = step.recorder.appraiser.codec.prompt(self._tasks[task], drawn)
            prompts.append([{"role": "user", "content": content}])
            digests.append([digest(exemplar.program) for exemplar in drawn])
        return {
            "prompt": prompts,
            "task": list(rows["task"]),
            # The loader renders one batch ahead, and may render more than are used. What a prompt
            # showed therefore travels with it, and is not computed again when its reward is.
            "exemplars": digests,
            "view": [view.generation] * len(prompts),
        }

    def get_task(self, name: str) -> TrainingTask:
        """The task of that id."""
        return self._tasks[name]

    def add_samples(self, samples: Sequence[StoredSample]) -> None:
        """Add what the first rank measured to the mirrors of the other ranks, as one more
        generation. On the first rank, whose database has the samples, nothing happens.
        """
        if _get_rank() != 0:
            for sample in samples:
                self._database.add(sample)
            # One commit for a step, as on the first rank: the number of a generation seeds the
            # draws of exemplars.
            self._database.settle()


class SpeedupReward:
    """A reward function as TRL calls it. It returns a reward for every completion, never None: a
    bad program has a reward, and a broken judge raises.
    """

    # TRL names the metrics of a reward function by its `__name__`, which an object does not have.
    __name__ = "speedup"

    def __init__(self, step: ContrastiveStep, prompt_source: PromptSource) -> None:
        self._step, self._prompt_source = step, prompt_source
        self._moments: Moments | None = None

    def __call__(
        self,
        completions: Sequence[Any],
        task: Sequence[str],
        exemplars: Sequence[Sequence[str]],
        **trl_arguments: Any,
    ) -> list[float]:
        """Smoothed rewards of this rank's completions; all ranks call it together."""
        number = int(trl_arguments["trainer_state"].global_step)
        local_completions = [
            (name, _get_text(completion), tuple(digests))
            for name, completion, digests in zip(task, completions, exemplars, strict=True)
        ]
        # A group may be spread over ranks, and smoothing needs the rewards of all groups of the
        # step.
        by_rank = _gather_from_ranks(local_completions)
        rank = _get_rank()
        measurements = (
            self._measure(number, [completion for group in by_rank for completion in group])
            if rank == 0
            else None
        )
        # Rewards, metrics and samples in one broadcast, so that no rank has the rewards of a step
        # without its samples.
        rewards, metrics, samples = _broadcast_from_first(measurements)
        self._prompt_source.add_samples(samples)
        for name, value in metrics.items():
            trl_arguments["log_metric"](name, value)
        # This rank's slice of the rewards, which are in the order of ranks.
        start = sum(len(group) for group in by_rank[:rank])
        return list(rewards[start : start + len(local_completions)])

    def _measure(
        self, number: int, completions: Sequence[tuple[str, str, tuple[str, ...]]]
    ) -> Measurements:
        """Measure the completions of all ranks, on the first rank. Returns their smoothed rewards,
        metrics, and the samples on record.
        """
        step, recorder = self._step, self._step.recorder
        # Read before this step's samples are in the database: a reward must not widen its own
        # bound.
        moments = self._moments or self._restore_moments()
        # a sample's name holds its text: a step that is repeated after a kill may have others
        requests = [
            NamedCompletion(
                f"{recorder.stage}/{number}/{i}/{digest(text)}",
                self._prompt_source.get_task(task),
                text,
                recorder.stage,
                digests,
            )
            for i, (task, text, digests) in enumerate(completions)
        ]
        measurements = recorder.appraiser.appraise(requests)
        # Committed once, after the whole step is measured: the next view has all of it or nothing.
        recorder.appraiser.database.settle()
        samples = [_get_sample(recorder.appraiser, request) for request in requests]
        rewards = [compute_reward(measurement, step.reward) for measurement in measurements]
        size = step.config.group
        smoothed, self._moments = smooth_rewards(
            [rewards[i : i + size] for i in range(0, len(rewards), size)],
            step.config.smoothing,
            moments,
        )
        flat_rewards = [reward for group in smoothed for reward in group]
        return flat_rewards, summarize_outcomes(measurements), samples

    def _restore_moments(self) -> Moments:
        """Restore the moments of the rewards of earlier steps, which are in the database after a
        restart.
        """
        recorder = self._step.recorder
        return Moments().with_rewards(
            compute_reward(sample.measured, self._step.reward)
            for sample in recorder.appraiser.database.samples()
            if sample.name.startswith(f"{recorder.stage}/")
        )


def _get_sample(appraiser: Appraiser, request: NamedCompletion) -> StoredSample:
    sample = appraiser.database.get(request.name)
    assert sample is not None
    return sample


def _get_text(completion: Any) -> str:
    """The text of a completion, which is a conversation or plain text."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _make_lora_config(rank: int) -> Any:
    return require_extra("peft").LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def _get_world_size() -> int:
    return (
        torch.distributed.get_world_size()
        if torch.distributed.is_available() and torch.distributed.is_initialized()
        else 1
    )


def _get_rank() -> int:
    return torch.distributed.get_rank() if _get_world_size() > 1 else 0


def _gather_from_ranks(values: list[Any]) -> list[list[Any]]:
    """The lists of all ranks, in their order."""
    if _get_world_size() == 1:
        return [values]
    values_by_rank: list[Any] = [None] * _get_world_size()
    torch.distributed.all_gather_object(values_by_rank, values)
    return values_by_rank


def _broadcast_from_first(value: Any) -> Any:
    """The first rank's value, on all ranks."""
    if _get_world_size() == 1:
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]
