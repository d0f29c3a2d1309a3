"""What a run stands on: codec, tasks, generators and an evaluator, from names as a user gives them.

    replay   the kernel-schedule language over a landscape of measurements; no device, no judge
    live     the judge, on this machine: the language's tasks, or a folder of KernelBench-style files for a language model

A replay of a machine is not a measurement of this one: the label says which it is.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.settings import Settings
from torch_cudal1.core.version import __version__
from torch_cudal1.device.target import target_for
from torch_cudal1.ingest.llm.casebase import CaseBase
from torch_cudal1.ingest.llm.checker import Checked, RuleChecker
from torch_cudal1.ingest.llm.endpoint import Endpoint
from torch_cudal1.ingest.llm.policy import Writer
from torch_cudal1.ingest.llm.records import Evaluator, Exemplar, Policy
from torch_cudal1.ingest.llm.text_codec import TextCodec
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.pool.evaluator import JudgeEvaluator
from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.judge.pool.score import Rule
from torch_cudal1.judge.pool.terms import Terms
from torch_cudal1.training.experiments.experiment import Bench
from torch_cudal1.training.experiments.plan import Plan
from torch_cudal1.training.generators import GENERATORS
from torch_cudal1.training.ksl.codec import KslCodec
from torch_cudal1.training.naive import NaiveEvaluator
from torch_cudal1.training.replay import ReplayEvaluator
from torch_cudal1.training.tasks import load_split, read_folder

__all__ = ["Ground", "TeachingText", "ground_bench", "naive_bench", "replay_bench", "writers"]

Device: TypeAlias = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Ground:
    """Where rewards come from. `landscape`: a file, "" for the CPU one of the package. `tasks`: a
    folder; then programs are source.

    `lanes`: how many programs the judge validates side by side. `naive`: an evaluator that can be
    cheated, for comparison only. `rule`, `baseline`: see `lane.Terms`.
    """

    live: bool = False
    landscape: str = ""
    tasks: str = ""
    device: Device = "cpu"
    lanes: int = 1
    naive: bool = False
    rule: Rule = "strict"
    baseline: Literal["eager", "best"] = "eager"
    generators: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.live and self.landscape:
            raise SettingError(
                "landscape",
                self.landscape,
                "nothing beside --live: rewards are measured, or looked up",
            )
        if self.tasks and not self.live:
            raise SettingError(
                "tasks",
                self.tasks,
                "--live beside it: a landscape knows only the programs of its own tasks",
            )
        if self.tasks and not self.generators:
            raise SettingError(
                "generators",
                self.generators,
                "models or endpoints that write source for the tasks of a folder",
            )


class TeachingText(TextCodec):
    """The text codec as a teacher: an answer is the code section alone, since nobody wrote down an
    analysis of it.
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
        return f"## Code\n\n```python\n{program.rstrip()}\n```"

    def programs(self, task: TrainingTask) -> Sequence[Any]:
        """Refuses: source has no end of programs."""
        raise SettingError(
            "codec", self.name, "the kernel-schedule language, whose programs can be listed"
        )


def replay_bench(plan: Plan, seed: int) -> Bench:
    """A plan's landscape. Measurement noise follows from the seed, so that the arms of a seed share
    it.
    """
    return _replay(plan.landscape, seed, naive=False).limited(plan)


def naive_bench(plan: Plan, seed: int) -> Bench:
    """The same as an evaluator saw it that can be cheated; its scores are no results."""
    return _replay(plan.landscape, seed, naive=True).limited(plan)


@contextmanager
def ground_bench(ground: Ground, settings: Settings, seed: int, folder: Path) -> Iterator[Bench]:
    """The bench of a single run, with the judge's processes as long as the block lasts."""
    if not ground.live:
        bench = _replay(ground.landscape, seed, naive=ground.naive)
        chosen = writers(ground.generators, settings) if ground.generators else bench.generators
        yield replace(bench, generators=chosen)
        return
    device = torch.device(ground.device)
    terms = Terms(
        *(settings, Contract(assume_finite=True), device, folder / "locks"),
        baseline=ground.baseline,
        rule=ground.rule,
        trust="foreign" if ground.tasks else "own",
    )
    label = f"live, {torch.cuda.get_device_name() if ground.device == 'cuda' else 'CPU'}"
    machine = _machine(device)
    with _measuring(ground, terms, folder) as evaluator:
        if ground.tasks:
            read = read_folder(Path(ground.tasks))
            if not read.tasks:
                raise SettingError(
                    "tasks",
                    ground.tasks,
                    "a folder with KernelBench-style files (Model, get_inputs, get_init_inputs)",
                )
            codec: Any = (
                TeachingText(torch.cuda.get_device_name())
                if ground.device == "cuda"
                else TeachingText("this CPU")
            )
            problems = tuple(f"task {name}: {why}" for name, why in read.unusable.items())
            chosen = writers(ground.generators, settings)
            yield Bench(
                label, codec, evaluator, chosen, read.tasks, {}, ground.device, problems, machine
            )
            return
        split = load_split(ground.device)
        chosen = (
            writers(ground.generators, settings) if ground.generators else list(GENERATORS.values())
        )
        held_out = {"shape": split.held_out_shapes, "family": split.held_out_families}
        yield Bench(
            label,
            KslCodec(ground.device),
            evaluator,
            chosen,
            split.train,
            held_out,
            ground.device,
            machine=machine,
        )


@contextmanager
def _measuring(ground: Ground, terms: Terms, folder: Path) -> Iterator[Evaluator]:
    """The judge, with a second opinion on jumps; what that refuses joins the run's own cases. Or
    what can be cheated.
    """
    if ground.naive:
        with NaiveEvaluator(terms) as naive:
            yield naive
        return
    cases = CaseBase.shipped(folder / "cheats.jsonl")
    with JudgeEvaluator(terms, lanes=ground.lanes) as judge:
        yield Checked(judge, RuleChecker(cases), cases)


def _machine(device: torch.device) -> dict[str, str]:
    """What numbers are worth nothing without."""
    here = target_for(device)
    gpu, driver = (
        (torch.cuda.get_device_name(device), here.driver) if device.type == "cuda" else ("", "")
    )
    versions = {
        "torch": here.torch,
        "triton": here.triton,
        "python": platform.python_version(),
        "package": __version__,
    }
    return {"gpu": gpu, "driver": driver, **versions}


def writers(
    names: Sequence[str], settings: Settings, *, max_new_tokens: int = 4096
) -> list[Policy]:
    """A URL is an OpenAI-compatible server, everything else a folder or a Hub name of a causal
    language model.
    """
    found: list[Policy] = []
    for name in names:
        if name.startswith(("http://", "https://")):
            found.append(Endpoint.from_settings(name, settings))
        else:
            path = Path(name)
            device = "cuda" if torch.cuda.is_available() else "cpu"
            found.append(
                Writer.load(
                    path if path.exists() else name, max_new_tokens=max_new_tokens, device=device
                )
            )
    return found


def _replay(landscape: str, seed: int, *, naive: bool) -> Bench:
    evaluator = ReplayEvaluator.load(Path(landscape) if landscape else None, seed=seed, naive=naive)
    split = evaluator.split()
    held_out = {"shape": split.held_out_shapes, "family": split.held_out_families}
    machine = evaluator.facts.get("gpu") or evaluator.facts.get("machine") or evaluator.device
    label = f"replay of {machine}" + (", trusting evaluator" if naive else "")
    return Bench(
        label,
        KslCodec(evaluator.device),
        evaluator,
        tuple(GENERATORS.values()),
        split.train,
        held_out,
    )
