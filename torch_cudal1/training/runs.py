"""A run in a folder, stage by stage: what `cudal1 train` does between its commands.

    run.json           what the run was begun with; later stages read it
    samples.jsonl      every sample with its measurement (`database`)
    *.journal          what was sampled, before it was measured (`journal`)
    begin, sft, selfsup, rl   models, each a folder that `from_pretrained` reads, in safetensors

A stage that was begun is not begun again by accident: `resume` goes on with it. Nothing that was
measured is measured again.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch_cudal1.core.errors import SettingError
from torch_cudal1.ingest.llm.appraise import Appraiser
from torch_cudal1.ingest.llm.database import Database
from torch_cudal1.ingest.llm.extras import needed
from torch_cudal1.ingest.llm.journal import Journal
from torch_cudal1.ingest.llm.policy import TinySpec, Writer, create_tiny
from torch_cudal1.ingest.llm.reward import RewardKind
from torch_cudal1.ingest.llm.selectors import SelectorName, selector
from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.training.benches import Ground
from torch_cudal1.training.contrastive import ContrastiveStep
from torch_cudal1.training.experiments.exam import Exam, examined, step_curve
from torch_cudal1.training.experiments.experiment import Bench
from torch_cudal1.training.experiments.plan import built
from torch_cudal1.training.recorder import Recorder
from torch_cudal1.training.rl_native import GrpoConfig, train
from torch_cudal1.training.rl_trl import TrlConfig, train_by_trl
from torch_cudal1.training.stages import (
    CollectConfig,
    RowConfig,
    SelfsupConfig,
    collect,
    collected,
    rows,
    selfsup,
)
from torch_cudal1.training.supervised import FitConfig, fit

__all__ = ["STAGES", "RunConfig", "Stage", "begin", "read_config", "stage_of"]

STAGES = ("collect", "sft", "selfsup", "rl")
Stage: TypeAlias = Literal["collect", "sft", "selfsup", "rl"]
Told: TypeAlias = Callable[[str, float | None], None]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All of a run. `model`: a folder or Hub name to begin with; "" makes a small one of `tiny`
    with the codec's vocabulary.

    `trl`: stage 3 by TRL instead of the native loop.
    """

    ground: Ground = field(default_factory=Ground)
    model: str = ""
    seed: int = 0
    max_new_tokens: int = 40
    tiny: TinySpec = field(default_factory=TinySpec)
    collect: CollectConfig = field(default_factory=CollectConfig)
    rows: RowConfig = field(default_factory=RowConfig)
    sft: FitConfig = field(default_factory=FitConfig)
    selfsup: SelfsupConfig = field(default_factory=SelfsupConfig)
    rl: GrpoConfig = field(default_factory=GrpoConfig)
    selector: SelectorName = "bucket"
    reward: RewardKind = "speedup"
    trl: TrlConfig | None = None


def begin(folder: Path, config: RunConfig) -> None:
    """Write down what a run is made of. Raises SettingError where the folder holds a run of
    something else.
    """
    path = folder / "run.json"
    if path.is_file():
        if read_config(path) != config:
            raise SettingError(
                "run",
                str(folder),
                "no run of other settings there; give another --run, or leave options out",
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(dataclasses.asdict(config), indent=1), encoding="utf-8")
    os.replace(fresh, path)


def read_config(path: Path) -> RunConfig:
    """From a JSON file with some or all of its names. Raises SettingError for a file that is none,
    by the name of what is wrong.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError(
            "config", str(path), f"a JSON file that can be read ({error})"
        ) from error
    return built(RunConfig, told, "config")


def stage_of(
    name: Stage, folder: Path, config: RunConfig, bench: Bench, *, resume: bool, told: Told
) -> dict[str, Any]:
    """Run one stage. Its facts, as a JSON object. Raises SettingError where it was begun without
    `resume`, or comes too early.

    In a process that is not the first of several it only helps: it has no database, and its facts
    are {}.
    """
    follows = (
        config.trl is not None
        and name == "rl"
        and needed("accelerate").PartialState(cpu=config.trl.cpu).process_index > 0
    )
    with Database(None if follows else folder / "samples.jsonl") as database:
        if not resume and not follows and _begun(name, folder, database):
            raise SettingError(
                "run",
                str(folder),
                f"--resume to go on with its stage {name!r}, which was begun; or another --run",
            )
        work = _Work(folder, config, bench, Appraiser(bench.codec, bench.evaluator, database), told)
        facts = {"collect": work.collect, "sft": work.sft, "selfsup": work.selfsup, "rl": work.rl}[
            name
        ]()
    return {} if follows else {"stage": name, "label": bench.label, **facts}


@dataclass(frozen=True)
class _Work:
    folder: Path
    config: RunConfig
    bench: Bench
    appraiser: Appraiser
    told: Told

    def collect(self) -> dict[str, Any]:
        problems = collect(
            self.appraiser,
            self.bench.train,
            self.bench.generators,
            self.config.collect,
            seed=self.config.seed,
            told=self.told,
        )
        return {
            "collected": collected(self.appraiser.database),
            "problems": [*self.bench.problems, *problems],
        }

    def sft(self) -> dict[str, Any]:
        config = self.config
        learned = rows(
            self.bench.codec,
            self.bench.train,
            self.appraiser.database,
            seed=config.seed,
            how=config.rows,
        )
        if not learned:
            raise SettingError(
                "run",
                str(self.folder),
                "collected successes: run `cudal1 train collect` first, or with more tasks",
            )
        writer = self._writer(self._beginning())
        steps = config.sft.steps
        losses = fit(
            writer,
            learned,
            config.sft,
            seed=config.seed,
            told=lambda step, loss: self.told("sft", step / steps),
        )
        writer.save(self.folder / "sft")
        return {
            "rows": len(learned),
            "first_loss": losses[0],
            "last_loss": losses[-1],
            **self._exam("exam-sft", writer),
        }

    def selfsup(self) -> dict[str, Any]:
        writer = self._writer(self._after("sft"))
        recorder = self._recorder("selfsup")
        found = selfsup(
            recorder,
            self.bench.codec,
            writer,
            self.config.selfsup,
            folder=self.folder / "selfsup",
            told=self.told,
        )
        return {"rounds": found, **self._exam("exam-selfsup", writer)}

    def rl(self) -> dict[str, Any]:
        config, start = self.config, self._after("selfsup")
        step = ContrastiveStep(
            self._recorder("rl"), config.rl, selector(config.selector), config.reward
        )
        if config.trl is not None:
            if config.rl.credit != "whole":
                raise SettingError(
                    "credit",
                    config.rl.credit,
                    "'whole' with TRL, which knows one advantage a sample",
                )
            train_by_trl(
                start,
                step,
                replace(config.trl, max_new_tokens=config.max_new_tokens),
                folder=self.folder / "trl",
            )
            return {"curve": self._curve(), "model": str(self.folder / "trl" / "model")}

        def gather(model: Writer, number: int) -> Any:
            self.told(f"rl: step {number + 1} of {config.rl.steps}", number / config.rl.steps)
            return step(model, number)

        writer = train(
            self._writer(start), gather, config.rl, folder=self.folder / "rl", seed=config.seed
        )
        exam = self._exam("exam-rl", writer, Exam(selector=selector(config.selector)))
        return {"curve": self._curve(), "model": str(self.folder / "rl"), **exam}

    def _curve(self) -> list[dict[str, float]]:
        return step_curve(self.appraiser.database, "rl", [task.id for task in self.tasks])

    def _exam(self, stage: str, writer: Writer, exam: Exam | None = None) -> dict[str, Any]:
        return {"exam": examined(self._recorder(stage), writer, exam or Exam())}

    @property
    def tasks(self) -> tuple[TrainingTask, ...]:
        """Those that something was collected for, if anything was: a task whose reference cannot be
        judged has no sample.
        """
        known = {
            s.measured.task
            for s in self.appraiser.database.samples()
            if s.name.startswith("collect/")
        }
        return tuple(task for task in self.bench.train if not known or task.id in known)

    def _recorder(self, stage: str) -> Recorder:
        return Recorder(
            self.appraiser,
            self.tasks,
            Journal(self.folder / f"{stage}.journal"),
            stage,
            self.config.seed,
        )

    def _writer(self, model: Path | str) -> Writer:
        return Writer.load(
            model, max_new_tokens=self.config.max_new_tokens, device=self.bench.device
        )

    def _beginning(self) -> Path | str:
        if self.config.model:
            path = Path(self.config.model)
            return path if path.exists() else self.config.model
        folder = self.folder / "begin"
        if not folder.is_dir():
            create_tiny(
                folder,
                self.bench.codec.vocabulary,
                replace(self.config.tiny, seed=self.config.seed),
            )
        return folder

    def _after(self, stage: str) -> Path:
        """The model that a stage left; of the one before it where there was no self-supervision."""
        for name in (stage, "sft"):
            if (self.folder / name / "config.json").is_file():
                return self.folder / name
        raise SettingError(
            "run",
            str(self.folder),
            f"the model of an earlier stage: run `cudal1 train {stage}` first",
        )


def _begun(name: Stage, folder: Path, database: Database) -> bool:
    if name == "collect":
        return any(sample.name.startswith("collect/") for sample in database.samples())
    return (folder / name).exists() or (folder / f"{name}.journal").exists()
