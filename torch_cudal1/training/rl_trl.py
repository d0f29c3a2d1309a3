"""The production path: TRL's GRPOTrainer with our prompts and our rewards. LoRA, vLLM servers and
many GPUs are TRL's own.

Prompts are rendered when a batch is fetched, from the last committed view: a pure function of seed,
task and view, so that all members of a group and all ranks show the same exemplars. The loader
fetches one batch ahead, so a view is a generation late. Rewards of all ranks are made by the first
one, which alone holds the judge and the database; the others mirror its views.

Launched by `accelerate launch` or `torchrun` for several processes (FSDP, DeepSpeed ZeRO); by
itself for one. It was run with a small model only: on the CPU, with and without LoRA, in one
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
from torch_cudal1.ingest.llm.appraise import Appraiser, Asked
from torch_cudal1.ingest.llm.database import Database, Sample, digest
from torch_cudal1.ingest.llm.extras import needed
from torch_cudal1.ingest.llm.reward import reward_of
from torch_cudal1.ingest.llm.selectors import exemplars
from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.training.contrastive import ContrastiveStep
from torch_cudal1.training.recorder import facts_of
from torch_cudal1.training.rl_native import GrpoConfig
from torch_cudal1.training.smoothing import Moments, smooth

__all__ = ["TrlConfig", "arguments", "train_by_trl"]

Measurements: TypeAlias = tuple[
    list[float], Mapping[str, float], list[Sample]
]  # rewards, facts, what was put on record


@dataclass(frozen=True, kw_only=True)
class TrlConfig:
    """What TRL adds. `lora_rank`: 0 trains all weights. `vllm_server`: URL of `trl vllm-serve`; ""
    samples here.
    """

    max_new_tokens: int = 1024
    lora_rank: int = 0
    vllm_server: str = ""
    bf16: bool = False
    cpu: bool = False
    checkpointing: bool = False
    processes: int = 1


def arguments(config: GrpoConfig, trl: TrlConfig, *, folder: Path, seed: int) -> Any:
    """TRL's GRPOConfig for ours. Raises SettingError for what TRL has no form of."""
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
    samples = config.group * config.groups
    if samples % (trl.processes * config.minibatches):
        raise SettingError(
            "group x groups",
            samples,
            f"a multiple of {trl.processes} processes times {config.minibatches} minibatches",
        )
    config_class = needed("trl").GRPOConfig
    options: dict[str, Any] = (
        {"vllm_mode": "server", "vllm_server_base_url": trl.vllm_server} if trl.vllm_server else {}
    )
    options[_checkpointing(config_class)] = trl.checkpointing
    return config_class(
        output_dir=str(folder),
        loss_type="grpo",  # the paper's mean over a sample's tokens; TRL's default is another
        use_bias_correction_kl=False,
        scale_rewards="group",
        beta=config.beta,
        epsilon=config.clip_low,
        epsilon_high=config.clip_high,
        entropy_coef=config.entropy,
        num_generations=config.group,
        num_iterations=config.epochs,
        steps_per_generation=config.minibatches,
        per_device_train_batch_size=samples // trl.processes // config.minibatches,
        max_steps=config.steps * config.epochs * config.minibatches,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=config.max_norm,
        temperature=config.temperature,
        max_completion_length=trl.max_new_tokens,
        bf16=trl.bf16,
        use_cpu=trl.cpu,
        use_vllm=bool(trl.vllm_server),
        dataloader_num_workers=0,  # a worker process would hold a stale copy of the database
        remove_unused_columns=False,
        save_steps=config.save_every,
        save_total_limit=2,
        logging_steps=1,
        report_to="none",
        seed=seed,
        **options,
    )


def _checkpointing(config_class: type) -> str:
    """How the installed transformers calls activation checkpointing; up to 5.17 at least it knew
    the older one alone.
    """
    names = {field.name for field in dataclasses.fields(config_class)}
    return (
        "activation_checkpointing"
        if "activation_checkpointing" in names
        else "gradient_checkpointing"
    )


def train_by_trl(
    model: Path | str, step: ContrastiveStep, trl: TrlConfig, *, folder: Path
) -> list[Mapping[str, Any]]:
    """Train the model at a path (or Hub name) into `folder`/model, from the last checkpoint there
    if there is one; TRL's log.

    The path is also the reference where beta is above 0, so it must hold the model of stage 2.
    """
    library, transformers, datasets = needed("trl"), needed("transformers"), needed("datasets")
    how = arguments(
        step.config, trl, folder=folder, seed=step.recorder.seed
    )  # this joins the other processes, if there are any
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, padding_side="left")
    scenes = Scenes(step)
    trainer = library.GRPOTrainer(
        model=str(model),
        reward_funcs=Rewards(step, scenes),
        args=how,
        train_dataset=datasets.Dataset.from_list(
            [{"task": task.id} for task in step.recorder.tasks]
        ).with_transform(scenes.render),
        processing_class=tokenizer,
        peft_config=_lora(trl.lora_rank) if trl.lora_rank else None,
    )
    resumes = any(path.is_dir() for path in folder.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=resumes or None)
    trainer.save_model(str(folder / "model"))
    return list(trainer.state.log_history)


class Scenes:
    """What prompts show: the view of the last commit, and, on ranks without the database, a mirror
    of it.
    """

    def __init__(self, step: ContrastiveStep) -> None:
        self._step = step
        self._tasks = {task.id: task for task in step.recorder.tasks}
        self._database = step.recorder.appraiser.database if _rank() == 0 else Database(None)
        self.take(
            _broadcast(list(step.recorder.appraiser.database.samples()) if _rank() == 0 else [])
        )

    def __getstate__(self) -> dict[str, Any]:
        """What the data set takes its fingerprint of. Nothing is ever restored from it."""
        return {"seed": self._step.recorder.seed, "tasks": tuple(self._tasks)}

    def render(self, rows: Mapping[str, Sequence[str]]) -> dict[str, list[Any]]:
        """A batch of the data set: prompts with what they show, in columns beside them. No side
        effects.
        """
        view = self._database.view()
        prompts, shown = [], []
        for task in rows["task"]:
            drawn = exemplars(
                self._step.selector,
                self._step.recorder.seed,
                task,
                view,
                shuffled=self._step.shuffled,
            )
            prompts.append(
                [
                    {
                        "role": "user",
                        "content": self._step.recorder.appraiser.codec.prompt(
                            self._tasks[task], drawn
                        ),
                    }
                ]
            )
            shown.append([digest(exemplar.program) for exemplar in drawn])
        return {
            "prompt": prompts,
            "task": list(rows["task"]),
            "exemplars": shown,
            "view": [view.generation] * len(prompts),
        }

    def task(self, name: str) -> TrainingTask:
        """By its id."""
        return self._tasks[name]

    def take(self, samples: Sequence[Sample]) -> None:
        """What the first rank measured, as one more generation of the mirrors; the first rank has
        it.
        """
        if _rank() != 0:
            for sample in samples:
                self._database.add(sample)
            self._database.settle()


class Rewards:
    """A reward function as TRL calls it. `None` is never answered: a bad program has a reward, a
    broken judge raises.
    """

    __name__ = "speedup"  # TRL names its metrics by it

    def __init__(self, step: ContrastiveStep, scenes: Scenes) -> None:
        self._step, self._scenes = step, scenes
        self._moments: Moments | None = None

    def __call__(
        self,
        completions: Sequence[Any],
        task: Sequence[str],
        exemplars: Sequence[Sequence[str]],
        **more: Any,
    ) -> list[float]:
        """Smoothed rewards of this rank's completions; all ranks call it together."""
        number = int(more["trainer_state"].global_step)
        own = [
            (name, _text(each), tuple(shown))
            for name, each, shown in zip(task, completions, exemplars, strict=True)
        ]
        everyone = _gathered(own)
        found = (
            self._measured(number, [one for rank in everyone for one in rank])
            if _rank() == 0
            else None
        )
        rewards, facts, samples = _broadcast(found)
        self._scenes.take(samples)
        for name, value in facts.items():
            more["log_metric"](name, value)
        start = sum(len(rank) for rank in everyone[: _rank()])
        return list(rewards[start : start + len(own)])

    def _measured(
        self, number: int, wanted: Sequence[tuple[str, str, tuple[str, ...]]]
    ) -> Measurements:
        """Of all ranks, on the first. A sample's name holds its text: a step that is done again
        after a kill may have others.
        """
        step, recorder = self._step, self._step.recorder
        before = self._moments or self._earlier()
        asked = [
            Asked(
                f"{recorder.stage}/{number}/{i}/{digest(text)}",
                self._scenes.task(task),
                text,
                recorder.stage,
                shown,
            )
            for i, (task, text, shown) in enumerate(wanted)
        ]
        measured = recorder.appraiser.appraise(asked)
        recorder.appraiser.database.settle()
        samples = [_known(recorder.appraiser, one) for one in asked]
        rewards = [reward_of(one, step.reward) for one in measured]
        size = step.config.group
        smoothed, self._moments = smooth(
            [rewards[i : i + size] for i in range(0, len(rewards), size)],
            step.config.smoothing,
            before,
        )
        return [each for group in smoothed for each in group], facts_of(measured), samples

    def _earlier(self) -> Moments:
        recorder = self._step.recorder
        samples = recorder.appraiser.database.samples()
        return Moments().with_rewards(
            reward_of(one.measured, self._step.reward)
            for one in samples
            if one.name.startswith(f"{recorder.stage}/")
        )


def _known(appraiser: Appraiser, one: Asked) -> Sample:
    sample = appraiser.database.get(one.name)
    assert sample is not None
    return sample


def _text(completion: Any) -> str:
    """A completion of a conversation, or of plain text."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _lora(rank: int) -> Any:
    return needed("peft").LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def _world() -> int:
    return (
        torch.distributed.get_world_size()
        if torch.distributed.is_available() and torch.distributed.is_initialized()
        else 1
    )


def _rank() -> int:
    return torch.distributed.get_rank() if _world() > 1 else 0


def _gathered(own: list[Any]) -> list[list[Any]]:
    if _world() == 1:
        return [own]
    found: list[Any] = [None] * _world()
    torch.distributed.all_gather_object(found, own)
    return found


def _broadcast(value: Any) -> Any:
    """What the first rank has, on all."""
    if _world() == 1:
        return value
    told = [value]
    torch.distributed.broadcast_object_list(told, src=0)
    return told[0]
