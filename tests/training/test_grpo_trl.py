"""The production path in the synthetic world, offline: a model folder through TRL, with our prompts
and rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.world import FIRST, SECOND, TASKS, WORDS, SyntheticCodec, SyntheticEvaluator
from torch_cudal1.core.errors import SettingError
from torch_cudal1.ingest.llm.appraise import Appraiser
from torch_cudal1.ingest.llm.database import Database, StoredSample, digest
from torch_cudal1.ingest.llm.journal import SampleJournal
from torch_cudal1.ingest.llm.policy import LanguageModel, TinySpec, create_tiny
from torch_cudal1.ingest.llm.selectors import make_selector
from torch_cudal1.judge.pool.measured import Decoded
from torch_cudal1.training.contrastive import ContrastiveStep
from torch_cudal1.training.grpo import GrpoConfig
from torch_cudal1.training.grpo_trl import (
    PromptSource,
    SpeedupReward,
    TrlConfig,
    build_trl_config,
    train_with_trl,
)
from torch_cudal1.training.recorder import Recorder
from torch_cudal1.training.smoothing import Smoothing
from torch_cudal1.training.supervised import FitConfig, SftRow, fine_tune

pytest.importorskip("trl")
CODEC = SyntheticCodec()
CONFIG = GrpoConfig(steps=2, group=4, groups=3, epochs=1, save_every=1, learning_rate=1e-3)
SMALL = TrlConfig(max_new_tokens=4, cpu=True)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes programs, as stage 2 would leave it."""
    folder = tmp_path_factory.mktemp("model")
    model = LanguageModel.load(
        create_tiny(folder / "new", WORDS, TinySpec(hidden=32, layers=1, heads=2, context=64)),
        max_new_tokens=4,
    )
    every = [f"{first} {second}" for first in FIRST for second in SECOND]
    fine_tune(
        model,
        [SftRow(CODEC.prompt(task), p) for task in TASKS for p in every],
        FitConfig(steps=60, learning_rate=1e-2),
        seed=0,
    )
    model.save(folder / "taught")
    return folder / "taught"


def step_in(
    folder: Path | None, *, config: GrpoConfig = CONFIG, exemplars: str = "bucket"
) -> ContrastiveStep:
    """A step with a database in which every task has four successes; close the database when done."""
    database = Database(None if folder is None else folder / "samples.jsonl")
    for task in TASKS:
        for i, first in enumerate(FIRST):
            program = f"{first} b0"
            (measured,) = SyntheticEvaluator().measure(task, [Decoded(program, "")])
            database.add(StoredSample(f"begin/{task.id}/{i}", measured))
    database.commit()
    journal = SampleJournal((folder or Path("/nowhere")) / "rl.journal")
    recorder = Recorder(Appraiser(CODEC, SyntheticEvaluator(), database), TASKS, journal, "rl", 0)
    return ContrastiveStep(recorder, config, make_selector(exemplars))


def samples_of(step: ContrastiveStep) -> list[StoredSample]:
    """In the order in which they were written: step, place in the step."""
    samples = [
        sample
        for sample in step.recorder.appraiser.database.samples()
        if sample.name.startswith("rl/")
    ]
    return sorted(samples, key=lambda sample: [int(part) for part in sample.name.split("/")[1:3]])


def train(
    taught: Path, folder: Path, config: GrpoConfig = CONFIG, trl: TrlConfig = SMALL
) -> tuple[list[Any], list[StoredSample]]:
    step = step_in(folder, config=config)
    try:
        return list(train_with_trl(taught, step, trl, folder=folder / "trl")), samples_of(step)
    finally:
        step.recorder.appraiser.database.close()


def test_a_run_measures_every_completion_and_leaves_a_model_that_loads(taught, tmp_path):
    log, samples = train(taught, tmp_path)
    assert len(samples) == 2 * 4 * 3
    assert all(len(sample.exemplars) == 2 for sample in samples)
    for group in range(0, len(samples), 4):
        assert len({(s.measured.task, s.exemplars) for s in samples[group : group + 4]}) == 1, (
            "one draw a group"
        )
    steps = [entry for entry in log if "reward" in entry]
    assert len(steps) == 2
    assert all("success" in entry for entry in steps)
    model = LanguageModel.load(tmp_path / "trl" / "model", max_new_tokens=4)
    before = LanguageModel.load(taught).model
    assert any(
        not torch.equal(a, b)
        for a, b in zip(model.model.parameters(), before.parameters(), strict=True)
    )
    assert (tmp_path / "trl" / "model" / "model.safetensors").is_file()


def test_a_run_goes_on_from_its_checkpoint(taught, tmp_path):
    train(taught, tmp_path, replace(CONFIG, steps=1))
    log, samples = train(taught, tmp_path)
    assert [entry["step"] for entry in log if "reward" in entry] == [1, 2]
    assert len(samples) == 2 * 4 * 3


def test_the_divergence_from_stage_two_is_measured_where_beta_asks_for_it(taught, tmp_path):
    log, _ = train(taught, tmp_path, replace(CONFIG, beta=0.1))
    assert all("kl" in entry for entry in log if "reward" in entry)


def test_low_rank_adapters_are_trained_and_the_model_is_not(taught, tmp_path):
    pytest.importorskip("peft")
    train(taught, tmp_path, replace(CONFIG, steps=1), replace(SMALL, lora_rank=4))
    assert (tmp_path / "trl" / "model" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "trl" / "model" / "model.safetensors").exists()


def test_prompts_are_a_pure_function_of_seed_task_and_view():
    step = step_in(None)
    scenes = PromptSource(step)
    rows = {"task": ["t0", "t0", "t1"]}
    first, again = scenes.render(rows), scenes.render(rows)
    assert first == again
    assert first["prompt"][0] == first["prompt"][1] != first["prompt"][2]
    step.recorder.appraiser.database.add(StoredSample("more", measure_sample("t0", "a3 b3")))
    assert scenes.render(rows) == first, "what is not committed is not shown"
    step.recorder.appraiser.database.commit()
    assert scenes.render(rows)["view"] == [2, 2, 2]


def measure_sample(task: str, program: str) -> Any:
    (measured,) = SyntheticEvaluator().measure(
        next(t for t in TASKS if t.id == task), [Decoded(program, "")]
    )
    return measured


class State:
    global_step = 0


def rewards_of(config: GrpoConfig, texts: Sequence[str]) -> list[float]:
    step = step_in(None, config=config)
    shown = [[digest("a0 b0")]] * len(texts)
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    return SpeedupReward(step, PromptSource(step))(
        completions, ["t0"] * len(texts), shown, trainer_state=State(), log_metric=lambda name, value: None
    )  # fmt: skip


def test_rewards_are_speed_ups_with_failures_as_nothing_and_smoothing_clips_them():
    texts = ["a0 b0", "a3 b0", "a0 b2", "junk"]
    assert rewards_of(replace(CONFIG, groups=1, smoothing=Smoothing(clip=None)), texts) == [
        0.5,
        2.0,
        0.0,
        0.0,
    ]
    smoothed = rewards_of(replace(CONFIG, groups=1, smoothing=Smoothing(clip=1.0)), texts)
    assert max(smoothed) == 1.0
    assert sorted(range(4), key=smoothed.__getitem__)[-1] == 1


def test_what_trl_has_no_form_of_is_refused(tmp_path):
    for wrong, named in (
        (replace(CONFIG, objective="max@k"), "max@k"),
        (replace(CONFIG, smoothing=Smoothing(clip_advantage=1.0)), "clip_advantage"),
    ):
        with pytest.raises(SettingError, match=named):
            build_trl_config(wrong, SMALL, folder=tmp_path, seed=0)
    with pytest.raises(SettingError, match="5 processes"):
        build_trl_config(CONFIG, replace(SMALL, processes=5), folder=tmp_path, seed=0)


def test_a_vllm_server_is_handed_to_trl(tmp_path):
    trl_config = build_trl_config(
        CONFIG, replace(SMALL, vllm_server="http://node7:8000"), folder=tmp_path, seed=0
    )
    assert (trl_config.use_vllm, trl_config.vllm_mode, trl_config.vllm_server_base_url) == (
        True,
        "server",
        "http://node7:8000",
    )
