"""A run in a folder, stage by stage, in the synthetic world; its settings as a file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.training.world import TASKS, Rules, SyntheticCodec, SyntheticEvaluator
from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.settings import Settings
from torch_cudal1.ingest.llm.database import Database
from torch_cudal1.ingest.llm.policy import LanguageModel, TinySpec
from torch_cudal1.judge.pool.measured import Decoded, TrainingTask
from torch_cudal1.training.environment import (
    Environment,
    RewardSource,
    SupervisedTextCodec,
    open_environment,
)
from torch_cudal1.training.grpo import GrpoConfig
from torch_cudal1.training.grpo_trl import TrlConfig
from torch_cudal1.training.runs import RunConfig, begin_run, read_config, run_stage
from torch_cudal1.training.stages import SelfsupConfig, ignore_progress
from torch_cudal1.training.supervised import FitConfig

FIT = FitConfig(steps=20, batch=8, learning_rate=5e-3)
CONFIG = RunConfig(
    max_new_tokens=4,
    tiny=TinySpec(hidden=32, layers=1, heads=2, context=64),
    sft=FIT,
    selfsup=SelfsupConfig(rounds=1, samples=4, fit=replace(FIT, steps=5)),
    rl=GrpoConfig(steps=2, group=4, groups=2, epochs=1, save_every=1),
)


pytestmark = pytest.mark.usefixtures("one_thread")


def make_environment(evaluator: SyntheticEvaluator | None = None) -> Environment:
    generators = [Rules("one", ["a0 b0", "a1 b3", "a2 b2"]), Rules("two", ["a3 b1", "a2 b0"])]
    return Environment(
        "synthetic", SyntheticCodec(), evaluator or SyntheticEvaluator(), generators, TASKS[:4], {}
    )


def stage(
    name,
    folder: Path,
    config: RunConfig = CONFIG,
    *,
    resume: bool = False,
    evaluator: SyntheticEvaluator | None = None,
):
    return run_stage(
        name, folder, config, make_environment(evaluator), resume=resume, report=ignore_progress
    )


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for name in ("collect", "sft", "selfsup", "rl"):
        facts = stage(name, folder)
        (folder / f"{name}.json").write_text(json.dumps(facts, allow_nan=False))
    return folder


def test_each_stage_leaves_a_model_folder_that_loads(run_folder):
    for name in ("begin", "sft", "selfsup", "rl"):
        assert (run_folder / name / "model.safetensors").is_file()
        assert LanguageModel.load(run_folder / name, max_new_tokens=4).sample(
            ["t0 <go>"], count=1, temperature=1.0, seed=0
        )


def test_each_stage_says_what_its_samples_were_worth(run_folder):
    facts = {
        name: json.loads((run_folder / f"{name}.json").read_text())
        for name in ("collect", "sft", "selfsup", "rl")
    }
    assert set(facts["collect"]["collected"]) == {"one", "two"}
    assert facts["sft"]["last_loss"] < facts["sft"]["first_loss"]
    assert all(0 <= facts[name]["exam"]["success"] <= 1 for name in ("sft", "selfsup", "rl"))
    assert len(facts["rl"]["curve"]) == 2


@pytest.mark.parametrize("name", ["collect", "sft", "selfsup", "rl"])
def test_a_stage_that_was_begun_is_not_begun_again_by_accident(run_folder, name):
    with pytest.raises(SettingError, match="--resume"):
        stage(name, run_folder)


def test_going_on_with_a_finished_stage_samples_nothing_new(run_folder):
    with Database(run_folder / "samples.jsonl", write=False) as database:
        before = len(database)
    evaluator = SyntheticEvaluator()
    for name in ("collect", "selfsup", "rl"):
        stage(name, run_folder, resume=True, evaluator=evaluator)
    with Database(run_folder / "samples.jsonl", write=False) as database:
        assert len(database) == before
    assert evaluator.asked == []


def test_a_stage_that_comes_too_early_says_what_comes_first(tmp_path):
    with pytest.raises(SettingError, match="train collect"):
        stage("sft", tmp_path)
    with pytest.raises(SettingError, match="train selfsup"):
        stage("rl", tmp_path)


def test_stage_three_by_trl_begins_with_the_model_of_stage_two(run_folder, tmp_path):
    pytest.importorskip("trl")
    for name in ("sft", "selfsup"):
        (tmp_path / name).symlink_to(run_folder / name)
    facts = stage("rl", tmp_path, replace(CONFIG, trl=TrlConfig(cpu=True)))
    assert Path(facts["model"], "model.safetensors").is_file()
    assert len(facts["curve"]) == 2


def test_settings_are_written_once_and_kept(tmp_path):
    begin_run(tmp_path, CONFIG)
    begin_run(tmp_path, CONFIG)
    assert read_config(tmp_path / "run.json") == CONFIG
    with pytest.raises(SettingError, match="other settings"):
        begin_run(tmp_path, replace(CONFIG, seed=1))
    begin_run(tmp_path / "trl", replace(CONFIG, trl=TrlConfig(lora_rank=8)))
    assert read_config(tmp_path / "trl" / "run.json").trl == TrlConfig(lora_rank=8)


def test_the_example_of_the_documentation_is_a_run(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "train-your-own-kernel-writer.md"
    (example,) = re.findall(r"```json\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "large.json").write_text(example)
    config = read_config(tmp_path / "large.json")
    assert config.ground.live
    assert config.trl is not None
    assert config.trl.lora_rank == 32


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"ground": {"live": True, "landscape": "x"}}, "landscape"),
        ({"ground": {"tasks": "folder"}}, "tasks"),
        ({"ground": {"tasks": "folder", "live": True}}, "generators"),
        ({"ground": {"device": "tpu"}}, "device"),
        ({"trl": {"lora": 8}}, "lora"),
        ({"rl": {"group": 1}}, "group"),
        ({"selector": "best"}, "selector"),
        ([], "config"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_name(tmp_path, settings, field):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(SettingError, match=field):
        read_config(tmp_path / "config.json")


def test_what_the_text_codec_teaches_is_what_it_reads():
    codec, task = SupervisedTextCodec(), TrainingTask("t", "class Model: ...")
    program = "import torch\n\nclass ModelNew(torch.nn.Module):\n    pass\n"
    decoded = codec.decode(task, codec.completion(task, program))
    assert isinstance(decoded, Decoded)
    assert decoded.program.strip() == program.strip()
    assert RewardSource(live=True).tasks == ""


def test_files_of_a_folder_that_are_no_tasks_are_reported_by_name(tmp_path):
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "half.py").write_text("class Model(")
    (tasks / "whole.py").write_text(
        "class Model: ...\ndef get_inputs(): ...\ndef get_init_inputs(): ...\n"
    )
    ground = RewardSource(live=True, tasks=str(tasks), generators=("http://127.0.0.1:9/v1",))
    with open_environment(ground, Settings(), 0, tmp_path / "run") as bench:
        assert [task.id for task in bench.train] == ["whole"]
        (problem,) = bench.problems
    assert problem.startswith("task half: SyntaxError")
