"""Results of an experiment whose truth is known."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from torch_cudal1.training.experiments.plan import ExperimentPlan, HeldOut

PLAN = ExperimentPlan(
    name="known",
    device="cpu",
    endpoint="Made up.",
    held_out=HeldOut(measurements=4, cap=8, reported=(1, 4)),
)


TASKS = tuple(f"t{i}" for i in range(12))


def result(
    arm: str, seed: int, *, gain: float = 0.0, failing: int = 0, with_optimum: bool = False
) -> dict[str, Any]:
    """A result whose held-out bests are those of its seed and task times (1 + gain); the first
    `failing` tasks have none.
    """

    def make_task_result(task: str) -> dict[str, Any]:
        best = (
            (1.5 + random.Random(f"{seed}/{task}").random()) * (1 + gain)
            if int(task[1:]) >= failing
            else None
        )
        curve = [best and best / 2, best and best / 2, best, best]
        return {
            "best": {"1": curve[0], "4": best},
            "curve": curve,
            "programs": 4,
            "samples": 4,
            "success": 1.0,
            "speedup": best or 0.0,
        }

    exam = {
        "success": 0.9,
        "speedup": 1.5 + gain,
        "log_speedup": 0.4 + gain,
        "best": dict.fromkeys(TASKS, 1.5),
        "samples": 8,
    }
    exam |= {"hack": 0.0, "undecodable": 0.0, "speedup_of_successes": 1.6}
    stages = {
        "sft": exam | {"success": 0.5 + seed / 100, "best": {**dict.fromkeys(TASKS, 1.2), "t0": None}},
        "selfsup": exam | {"success": 0.7 + seed / 100, "log_speedup": 0.4},
        "rounds": [], "rows": 10, "collected": {"rules": {"attempts": 20, "ok": 4, "wrong": 16}},
    }  # fmt: skip
    curve = [{"step": float(i), "programs": 4.0 * i, "best": 1.0 + i / 10, "success": 0.9, "speedup": 1.0, "hack": 0.0,
              "undecodable": 0.1} for i in range(12)]  # fmt: skip
    trained_with = {"A4": "none", "A5": "random"}.get(arm, "bucket")
    tests = {
        name: {task: make_task_result(task) for task in TASKS}
        for name in dict.fromkeys((trained_with, "none", "bucket"))
    }
    optimum = dict.fromkeys(TASKS, 2.0) if with_optimum else {}
    kinds = {"shape": list(TASKS[:8]), "family": list(TASKS[8:])}
    facts = {
        "plan": PLAN.digest,
        "label": "synthetic",
        "arm": arm,
        "seed": seed,
        "own": trained_with,
        "kinds": kinds,
        "optimum": optimum,
    }
    return {**facts, "stages": stages, "exam": exam, "curve": curve, "held_out": tests}


def arms(gains: Mapping[str, float], seeds: int = 4) -> list[dict[str, Any]]:
    return [result(arm, seed, gain=gain) for arm, gain in gains.items() for seed in range(seeds)]
