"""A run in a folder, stage by stage: what `cudal1 train collect|sft|selfsup|rl` does.

    run.json           the settings the run began with; later stages read them
    samples.jsonl      every sample with its measurement (`ingest.llm.database`)
    *.journal          what was sampled, written before it was measured (`ingest.llm.journal`)
    begin, sft, selfsup, rl   models, each a folder that `from_pretrained` reads, in safetensors

A stage that has begun is not begun again by accident: `resume` goes on with it. A sample that was
measured is not measured again.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch_cudal1.core.errors import SettingError
from torch_cudal1.ingest.llm.appraise import Appraiser
from torch_cudal1.ingest.llm.database import Database
from torch_cudal1.ingest.llm.extras import require_extra
from torch_cudal1.ingest.llm.journal import SampleJournal
from torch_cudal1.ingest.llm.policy import LanguageModel, TinySpec, create_tiny
from torch_cudal1.ingest.llm.reward import RewardKind
from torch_cudal1.ingest.llm.selectors import SelectorName, make_selector
from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.training.contrastive import ContrastiveStep
from torch_cudal1.training.environment import Environment, RewardSource
from torch_cudal1.training.experiments.plan import build_dataclass
from torch_cudal1.training.experiments.policy_eval import (
    PolicyEvalConfig,
    compute_step_curve,
    evaluate_policy,
)
from torch_cudal1.training.grpo import Generation, GrpoConfig, train_policy
from torch_cudal1.training.grpo_trl import TrlConfig, train_with_trl
from torch_cudal1.training.recorder import Recorder
from torch_cudal1.training.stages import (
    CollectConfig,
    ReportProgress,
    RowConfig,
    SelfsupConfig,
    build_sft_rows,
    collect,
    count_outcomes,
    self_supervise,
)
from torch_cudal1.training.supervised import FitConfig, fine_tune

__all__ = ["STAGES", "RunConfig", "Stage", "begin_run", "read_config", "run_stage"]

STAGES = ("collect", "sft", "selfsup", "rl")
Stage: TypeAlias = Literal["collect", "sft", "selfsup", "rl"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run. `model`: a folder or Hub name to begin with; "" makes a small model by
    `tiny` with the codec's vocabulary.

    `trl`: settings of stage 3 by TRL; None: the native loop.
    """

    ground: RewardSource = field(default_factory=RewardSource)
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


def begin_run(folder: Path, config: RunConfig) -> None:
    """Write the settings of a run. Raises SettingError where the folder holds a run with other
    settings.
    """
    path = folder / "run.json"
    if path.is_file():
        # A run's samples and models belong to one set of settings; mixed ones would be reported as
        # one run.
        if read_config(path) != config:
            raise SettingError(
                "run",
                str(folder),
                "no run of other settings there; give another --run, or leave options out",
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    new_path = path.with_suffix(".new")
    # Written beside it and renamed: a kill in the middle must not leave a run.json that cannot be
    # read, since every later stage begins with it.
    new_path.write_text(json.dumps(dataclasses.asdict(config), indent=1), encoding="utf-8")
    os.replace(new_path, path)


def read_config(path: Path) -> RunConfig:
    """From a JSON file with some or all of its names. Raises SettingError for another file, with
    the name of what is wrong.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError(
            "config", str(path), f"a JSON file that can be read ({error})"
        ) from error
    return build_dataclass(RunConfig, content, "config")


def run_stage(
    name: Stage,
    folder: Path,
    config: RunConfig,
    environment: Environment,
    *,
    resume: bool,
    report: ReportProgress,
) -> dict[str, Any]:
    """Run one stage. Returns its facts as a JSON object. Raises SettingError where it was begun
    without `resume`, or where an earlier stage is missing.

    Under TRL with several processes, ranks after the first compute gradients only: they have no
    database, and their facts are {}.
    """
    # accelerate sets up the process group and knows the rank; before TRL has built its arguments
    # there is no other source of it.
    is_follower = (
        config.trl is not None
        and name == "rl"
        and require_extra("accelerate").PartialState(cpu=config.trl.cpu).process_index > 0
    )
    # The journal has one writer. Ranks after the first receive what it measured by broadcast.
    with Database(None if is_follower else folder / "samples.jsonl") as database:
        # The first rank decides alone: the others may find files that it has made since.
        if not resume and not is_follower and _has_begun(name, folder, database):
            raise SettingError(
                "run",
                str(folder),
                f"--resume to go on with its stage {name!r}, which was begun; or another --run",
            )
        appraiser = Appraiser(environment.codec, environment.evaluator, database)
        runner = _StageRunner(folder, config, environment, appraiser, report)
        # `name` is one of STAGES; the command line's choices and the type see to it.
        facts: dict[str, Any] = getattr(runner, name)()
    # A follower's files would overwrite those of the first rank with the same names.
    return {} if is_follower else {"stage": name, "label": environment.label, **facts}


@dataclass(frozen=True)
class _StageRunner:
    """A method for each stage, by its name; each returns the stage's facts."""

    folder: Path
    config: RunConfig
    environment: Environment
    appraiser: Appraiser
    report: ReportProgress

    def collect(self) -> dict[str, Any]:
        problems = collect(
            self.appraiser,
            self.environment.train,
            self.environment.generators,
            self.config.collect,
            seed=self.config.seed,
            report=self.report,
        )
        return {
            "collected": count_outcomes(self.appraiser.database),
            "problems": [*self.environment.problems, *problems],
        }

    def sft(self) -> dict[str, Any]:
        config = self.config
        rows = build_sft_rows(
            self.environment.codec,
            self.environment.train,
            self.appraiser.database,
            seed=config.seed,
            config=config.rows,
        )
        # Rows come from successes. With none there is nothing to learn, and the cause is an earlier
        # stage.
        if not rows:
            raise SettingError(
                "run",
                str(self.folder),
                "collected successes: run `cudal1 train collect` first, or with more tasks",
            )
        model = self._load_model(self._find_start_model())
        losses = fine_tune(
            model,
            rows,
            config.sft,
            seed=config.seed,
            report=lambda step, loss: self.report("sft", step / config.sft.steps),
        )
        # Before the exam, which samples and measures: a kill there must not cost the training.
        model.save(self.folder / "sft")
        return {
            "rows": len(rows),
            "first_loss": losses[0],
            "last_loss": losses[-1],
            **self._evaluate("exam-sft", model),
        }

    def selfsup(self) -> dict[str, Any]:
        # Loaded anew, also when a round was finished before: `self_supervise` restores that itself.
        model = self._load_model(self._find_model_after("sft"))
        rounds = self_supervise(
            self._make_recorder("selfsup"),
            self.environment.codec,
            model,
            self.config.selfsup,
            folder=self.folder / "selfsup",
            report=self.report,
        )
        return {"rounds": rounds, **self._evaluate("exam-selfsup", model)}

    def rl(self) -> dict[str, Any]:
        config, start = self.config, self._find_model_after("selfsup")
        step = ContrastiveStep(
            # The stage's name is the first part of every sample's name, by which curves and
            # restored moments find their samples.
            self._make_recorder("rl"),
            config.rl,
            make_selector(config.selector),
            config.reward,
        )
        # Before the model is loaded here: TRL loads and shards it itself, from the path.
        if config.trl is not None:
            return self._train_with_trl(start, step, config.trl)

        def generate(policy: LanguageModel, number: int) -> Generation | None:
            self.report(f"rl: step {number + 1} of {config.rl.steps}", number / config.rl.steps)
            return step(policy, number)

        model = train_policy(
            self._load_model(start),
            generate,
            config.rl,
            folder=self.folder / "rl",
            seed=config.seed,
        )
        # With the exemplars it was trained with: without them the prompt would be of another form
        # than those of the training.
        exam = self._evaluate(
            "exam-rl", model, PolicyEvalConfig(selector=make_selector(config.selector))
        )
        return {"curve": self._compute_curve(), "model": str(self.folder / "rl"), **exam}

    def _train_with_trl(
        self, start: Path, step: ContrastiveStep, config: TrlConfig
    ) -> dict[str, Any]:
        # Refused, not ignored: the run would be reported with a credit that it did not have.
        if self.config.rl.credit != "whole":
            raise SettingError(
                "credit",
                self.config.rl.credit,
                "'whole' with TRL, which knows one advantage a sample",
            )
        train_with_trl(
            start,
            step,
            replace(config, max_new_tokens=self.config.max_new_tokens),
            # Not in "rl": TRL's checkpoint folders and those of the native loop have different
            # forms.
            folder=self.folder / "trl",
        )
        return {"curve": self._compute_curve(), "model": str(self.folder / "trl" / "model")}

    @property
    def tasks(self) -> tuple[TrainingTask, ...]:
        """The tasks that have a collected sample, or all where nothing was collected. A task whose
        reference cannot be judged has no sample.
        """
        collected_tasks = {
            sample.measured.task
            for sample in self.appraiser.database.samples()
            # A task that could not be judged in `collect` would stop a later stage, where the
            # evaluator raises for it.
            if sample.name.startswith("collect/")
        }
        return tuple(
            task
            for task in self.environment.train
            if not collected_tasks or task.id in collected_tasks
        )

    def _compute_curve(self) -> list[dict[str, float]]:
        return compute_step_curve(self.appraiser.database, "rl", [task.id for task in self.tasks])

    def _evaluate(
        self, stage: str, model: LanguageModel, config: PolicyEvalConfig | None = None
    ) -> dict[str, Any]:
        recorder = self._make_recorder(stage)
        return {"exam": evaluate_policy(recorder, model, config or PolicyEvalConfig())}

    def _make_recorder(self, stage: str) -> Recorder:
        # A journal for each stage: `_has_begun` sees by its file whether a stage was begun.
        journal = SampleJournal(self.folder / f"{stage}.journal")
        return Recorder(self.appraiser, self.tasks, journal, stage, self.config.seed)

    def _load_model(self, model: Path | str) -> LanguageModel:
        return LanguageModel.load(
            model, max_new_tokens=self.config.max_new_tokens, device=self.environment.device
        )

    def _find_start_model(self) -> Path | str:
        """The folder or Hub name of the settings, or a new small model, which is made once."""
        if self.config.model:
            path = Path(self.config.model)
            # A name that is no folder here is one of the Hub.
            return path if path.exists() else self.config.model
        folder = self.folder / "begin"
        # Made once: a resumed run must begin with the same weights, also with another version of
        # torch, whose random initialisation may differ.
        if not folder.is_dir():
            create_tiny(
                folder,
                self.environment.codec.vocabulary,
                # The run's seed decides the weights too, so that runs of different seeds are
                # independent.
                replace(self.config.tiny, seed=self.config.seed),
            )
        return folder

    def _find_model_after(self, stage: str) -> Path:
        """The model of a stage; that of stage 1 where there was no self-supervision. Raises
        SettingError where there is neither.
        """
        for name in (stage, "sft"):
            # A folder alone is not enough: training that was killed may have made it without a
            # model. `config.json` is what `from_pretrained` needs first.
            if (self.folder / name / "config.json").is_file():
                return self.folder / name
        raise SettingError(
            "run",
            str(self.folder),
            f"the model of an earlier stage: run `cudal1 train {stage}` first",
        )


def _has_begun(name: Stage, folder: Path, database: Database) -> bool:
    # `collect` leaves neither a folder nor a journal, its samples in the shared database only.
    if name == "collect":
        return any(sample.name.startswith("collect/") for sample in database.samples())
    return (folder / name).exists() or (folder / f"{name}.journal").exists()
