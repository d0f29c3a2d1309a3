"""The environment in which a policy is trained: a codec, tasks, generators, and the evaluator that
rewards programs. `replay` is the kernel-schedule language over a landscape of measurements, without
a device or a judge. `live` is the judge on this machine, with the language's tasks or a folder of
KernelBench-style files for a language model.

A replay of a machine is not a measurement of this one; the label says which of the two it is.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import torch

from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.settings import Settings
from torch_cudal1.core.version import __version__
from torch_cudal1.device.target import target_for
from torch_cudal1.ingest.llm.casebase import CaseBase
from torch_cudal1.ingest.llm.checker import CheckedEvaluator, RuleChecker
from torch_cudal1.ingest.llm.endpoint import Endpoint
from torch_cudal1.ingest.llm.policy import LanguageModel
from torch_cudal1.ingest.llm.records import Evaluator, Exemplar, Policy
from torch_cudal1.ingest.llm.text_codec import TextCodec
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.pool.judge_evaluator import JudgeEvaluator
from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.judge.pool.measurement_settings import MeasurementSettings
from torch_cudal1.judge.pool.score import ScoreRule
from torch_cudal1.training.experiments.plan import ExperimentPlan
from torch_cudal1.training.generators import GENERATORS
from torch_cudal1.training.ksl.codec import KslCodec
from torch_cudal1.training.naive import NaiveEvaluator
from torch_cudal1.training.replay import ReplayEvaluator
from torch_cudal1.training.stages import SupervisedCodec
from torch_cudal1.training.tasks import load_split, read_folder

__all__ = [
    "ClosedCodec",
    "Environment",
    "RewardSource",
    "SupervisedTextCodec",
    "load_naive_environment",
    "load_replay_environment",
    "load_writers",
    "open_environment",
]

Device: TypeAlias = Literal["cpu", "cuda"]


class ClosedCodec(SupervisedCodec, Protocol):
    """A codec whose programs and words can be listed."""

    @property
    def vocabulary(self) -> Sequence[str]:
        """Every word of prompts and answers."""
        ...

    def programs(self, task: TrainingTask) -> Sequence[Any]:
        """Every program there is for a task; `.text` is its canonical form, `.hack` names its
        cheat.
        """
        ...


@dataclass(frozen=True)
class Environment:
    """Everything around the policy. `label`: "replay" or "live", with the machine the numbers come
    from. `train`, `held_out`: the tasks, the latter by kind.

    `device`: where the model is; the evaluator measures on its own device. `problems`: tasks of a
    folder that cannot be used, and why. `machine`: GPU and versions of live measurements; empty for
    a replay, whose landscape holds them.
    """

    label: str
    codec: ClosedCodec
    evaluator: Evaluator
    generators: Sequence[Policy]
    train: tuple[TrainingTask, ...]
    held_out: Mapping[str, tuple[TrainingTask, ...]]
    device: str = "cpu"
    problems: tuple[str, ...] = ()
    machine: Mapping[str, str] = field(default_factory=dict)

    def limit_tasks(self, plan: ExperimentPlan) -> Environment:
        """Return the environment with as many tasks as the plan asks for."""
        held_out = {
            kind: _pick_evenly(tasks, plan.held_out_tasks) for kind, tasks in self.held_out.items()
        }
        return replace(self, train=_pick_evenly(self.train, plan.train_tasks), held_out=held_out)

    @property
    def held_out_tasks(self) -> tuple[TrainingTask, ...]:
        """Held-out tasks of all kinds."""
        return tuple(task for tasks in self.held_out.values() for task in tasks)


@dataclass(frozen=True, kw_only=True)
class RewardSource:
    """Where rewards come from, as a user names it; `ground` in run.json.

    `landscape`: a file, "" for the CPU landscape of the package. `tasks`: a folder; programs are
    then source text. `lanes`: how many programs the judge validates side by side. `naive`: an
    evaluator that can be cheated, for comparison only. `rule`, `baseline`: see
    `judge.pool.measurement_settings.MeasurementSettings`.
    """

    live: bool = False
    landscape: str = ""
    tasks: str = ""
    device: Device = "cpu"
    lanes: int = 1
    naive: bool = False
    rule: ScoreRule = "strict"
    baseline: Literal["eager", "best"] = "eager"
    generators: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # A run has one source of rewards; with both, its label could say either.
        if self.live and self.landscape:
            raise SettingError(
                "landscape",
                self.landscape,
                "nothing beside --live: rewards are measured, or looked up",
            )
        # A model writes any source for a folder's tasks, and a landscape holds a closed set of
        # programs.
        if self.tasks and not self.live:
            raise SettingError(
                "tasks",
                self.tasks,
                "--live beside it: a landscape knows only the programs of its own tasks",
            )
        # The built-in generators write the kernel-schedule language, not source.
        if self.tasks and not self.generators:
            raise SettingError(
                "generators",
                self.generators,
                "models or endpoints that write source for the tasks of a folder",
            )


class SupervisedTextCodec(TextCodec):
    """The text codec for fine-tuning: an answer is the code section alone, since collected programs
    come without an analysis.
    """

    vocabulary: Sequence[str] = ()

    def completion(
        self,
        task: TrainingTask,
        program: str,
        exemplars: Sequence[Exemplar] = (),
        *,
        analysis: bool = True,
    ) -> str:
        """The answer whose code is this program."""
        # The heading that `TextCodec.decode` looks for: the model must learn what will be read.
        return f"## Code\n\n```python\n{program.rstrip()}\n```"

    def programs(self, task: TrainingTask) -> Sequence[Any]:
        """Raise SettingError: programs in source text cannot be listed."""
        raise SettingError(
            "codec", self.name, "the kernel-schedule language, whose programs can be listed"
        )


def load_replay_environment(plan: ExperimentPlan, seed: int) -> Environment:
    """Load the replay of a plan's landscape. Measurement noise follows from the seed, so the arms
    of a seed share it.
    """
    return _load_replay(plan.landscape, seed, naive=False).limit_tasks(plan)


def load_naive_environment(plan: ExperimentPlan, seed: int) -> Environment:
    """Load the same replay with the scores of an evaluator that can be cheated. They are not
    results.
    """
    return _load_replay(plan.landscape, seed, naive=True).limit_tasks(plan)


@contextmanager
def open_environment(
    source: RewardSource, settings: Settings, seed: int, folder: Path
) -> Iterator[Environment]:
    """Open the environment of a single run. The judge's processes live as long as the block."""
    if not source.live:
        # No judge, no processes and no device: a replay runs on any machine.
        environment = _load_replay(source.landscape, seed, naive=source.naive)
        if source.generators:
            environment = replace(environment, generators=load_writers(source.generators, settings))
        yield environment
        return
    device = torch.device(source.device)
    measurement_settings = MeasurementSettings(
        # Rewrites such as diag(d) @ x as d * x differ where a value is infinite or NaN; they are
        # among the paper's cases, so inputs count as finite. Locks are in the run's folder, where
        # all slots of this evaluator find them.
        *(settings, Contract(assume_finite=True), device, folder / "locks"),
        baseline=source.baseline,
        rule=source.rule,
        # Source by a language model may do anything, so its process is used once and timed on the
        # wall. Programs that our templates render share processes, and the GPU's own time counts.
        trust="foreign" if source.tasks else "own",
    )
    with _open_evaluator(source, measurement_settings, folder) as evaluator:
        if source.tasks:
            yield _make_folder_environment(source, settings, evaluator)
        else:
            yield _make_language_environment(source, settings, evaluator)


def load_writers(
    names: Sequence[str], settings: Settings, *, max_new_tokens: int = 4096
) -> list[Policy]:
    """Load the models that write programs: a URL is an OpenAI-compatible server, any other name a
    folder or a Hub name of a causal language model.
    """
    # Where generators run, which need not be the device that is measured.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    writers: list[Policy] = []
    for name in names:
        # `Endpoint.from_settings` takes the key from the settings: it is sent to this server only,
        # and stands in no run.json.
        if name.startswith(("http://", "https://")):
            writers.append(Endpoint.from_settings(name, settings))
        else:
            path = Path(name)
            writers.append(
                LanguageModel.load(
                    # A name that is no folder here is one of the Hub.
                    path if path.exists() else name,
                    max_new_tokens=max_new_tokens,
                    device=device,
                )
            )
    return writers


def _make_folder_environment(
    source: RewardSource, settings: Settings, evaluator: Evaluator
) -> Environment:
    """Make the environment of a folder of KernelBench-style files, for which language models write
    source text.
    """
    task_folder = read_folder(Path(source.tasks))
    # A wrong path would otherwise become a run without tasks that succeeds at once.
    if not task_folder.tasks:
        raise SettingError(
            "tasks",
            source.tasks,
            "a folder with KernelBench-style files (Model, get_inputs, get_init_inputs)",
        )
    # The prompt names the processor: which program is fast depends on it.
    processor = torch.cuda.get_device_name() if source.device == "cuda" else "this CPU"
    codec: Any = SupervisedTextCodec(processor)
    return Environment(
        _label_live(source.device),
        codec,
        evaluator,
        load_writers(source.generators, settings),
        task_folder.tasks,
        {},
        source.device,
        # Unusable files are reported and the run goes on with the others.
        tuple(f"task {name}: {reason}" for name, reason in task_folder.unusable.items()),
        _describe_machine(torch.device(source.device)),
    )


def _make_language_environment(
    source: RewardSource, settings: Settings, evaluator: Evaluator
) -> Environment:
    """Make the environment of the tasks of the kernel-schedule language."""
    split = load_split(source.device)
    return Environment(
        _label_live(source.device),
        KslCodec(source.device),
        evaluator,
        load_writers(source.generators, settings)
        if source.generators
        else list(GENERATORS.values()),
        split.train,
        {"shape": split.held_out_shapes, "family": split.held_out_families},
        source.device,
        machine=_describe_machine(torch.device(source.device)),
    )


def _load_replay(landscape: str, seed: int, *, naive: bool) -> Environment:
    evaluator = ReplayEvaluator.load(Path(landscape) if landscape else None, seed=seed, naive=naive)
    split = evaluator.split()
    # A landscape of a CPU has no name of a GPU.
    machine = evaluator.facts.get("gpu") or evaluator.facts.get("machine") or evaluator.device
    return Environment(
        f"replay of {machine}" + (", trusting evaluator" if naive else ""),
        KslCodec(evaluator.device),
        evaluator,
        tuple(GENERATORS.values()),
        split.train,
        {"shape": split.held_out_shapes, "family": split.held_out_families},
    )


@contextmanager
def _open_evaluator(
    source: RewardSource, measurement_settings: MeasurementSettings, folder: Path
) -> Iterator[Evaluator]:
    """Open the judge, or the naive evaluator. Beside the judge a checker examines rewards that
    jump; the programs that it refuses join the run's hacking cases.
    """
    # No checker and no case base: this evaluator is there to be deceived.
    if source.naive:
        with NaiveEvaluator(measurement_settings) as naive:
            yield naive
        return
    # New cases go to the run's folder; those of the package are read-only data.
    cases = CaseBase.shipped(folder / "cheats.jsonl")
    with JudgeEvaluator(measurement_settings, slots=source.lanes) as judge:
        # The defences of the paper (section 3): a checker is asked when a reward jumps, and what it
        # refuses joins the cases that it knows. The judge has measured before it.
        yield CheckedEvaluator(judge, RuleChecker(cases), cases)


def _label_live(device: Device) -> str:
    return f"live, {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}"


def _describe_machine(device: torch.device) -> dict[str, str]:
    """GPU, driver and versions. Without them a live measurement cannot be compared."""
    target = target_for(device)
    is_cuda = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if is_cuda else "",
        "driver": target.driver if is_cuda else "",
        "torch": target.torch,
        "triton": target.triton,
        "python": platform.python_version(),
        "package": __version__,
    }


def _pick_evenly(tasks: tuple[TrainingTask, ...], count: int | None) -> tuple[TrainingTask, ...]:
    """Pick `count` of the tasks at even distances, since neighbours are shapes of one operation."""
    if count is None or count >= len(tasks):
        return tasks
    # The first `count` would be all shapes of a few operations.
    return tuple(tasks[i * len(tasks) // count] for i in range(count))
