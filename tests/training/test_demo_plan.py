"""The demonstration's plan is one that runs in minutes and claims nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from torch_cudal1.training.experiments.demo_plan import DEMO
from torch_cudal1.training.experiments.plan import ARMS, read_plan
from torch_cudal1.training.ksl.codec import KslCodec
from torch_cudal1.training.tasks import load_split


def test_it_is_a_plan_that_a_file_can_hold(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    path.write_text(json.dumps(asdict(DEMO)))
    assert read_plan(path) == DEMO
    assert read_plan(path).digest == DEMO.digest


def test_it_needs_no_gpu_and_shows_an_arm_of_each_kind() -> None:
    assert DEMO.device == "cpu"
    arms = [ARMS[name] for name in DEMO.arms]
    assert {arm.learns for arm in arms} == {arm.learns for arm in ARMS.values()}
    assert "demonstration" in DEMO.endpoint


def test_prompts_and_answers_fit_into_its_model() -> None:
    codec, tasks = KslCodec("cpu"), load_split("cpu").train
    longest_prompt = max(len(codec.prompt(task).split()) for task in tasks)
    assert longest_prompt + DEMO.max_new_tokens <= DEMO.model.context


def test_what_it_reports_of_held_out_tasks_is_measured_within_the_budget() -> None:
    assert max(DEMO.held_out.reported) <= DEMO.held_out.measurements
    assert DEMO.held_out.measurements <= DEMO.held_out.cap <= DEMO.budget
