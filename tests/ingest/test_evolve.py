"""Evolution against a scripted server and evaluator: what is asked, what is paid, what is shown,
what survives a kill.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.training import loopback as acts
from tests.training.loopback import Loopback, loopback, reply, status
from tests.training.sources import TASK, source
from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ingest.llm.endpoint import Completion, Endpoint, RetryPolicy, TokenPrices
from torch_cudal1.ingest.llm.evolve import Budget, Evolution, EvolutionPlan, Evolved, LocalWriter
from torch_cudal1.ingest.llm.selectors import Nothing
from torch_cudal1.ingest.llm.text_codec import TextCodec
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask


class Scores:
    """Programs that return x plus a number have that number as their speed-up; negative ones are
    wrong.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []

    def measure(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Measured]:
        measurements = []
        for candidate in programs:
            self.asked.append(candidate.program)
            value = float(candidate.source.split("x + ")[1].split("\n")[0])
            good = (
                Measured(task.id, candidate.program, "ok", value, buckets=(value,) * 7)
                if value > 0
                else None
            )
            measurements.append(good or Measured(task.id, candidate.program, "wrong"))
        return measurements


def answer(value: float) -> str:
    return f"## Analysis\n\nHm.\n\n## Code\n\n```python\n{source(f'x + {value}')}```\n"


def improving() -> Callable[[str], str]:
    """A model that answers every prompt with a little more than any version it is shown."""
    values = (1 + step / 8 for step in range(1, 1_000))
    lock = threading.Lock()

    def complete(prompt: str) -> str:
        with lock:
            return answer(next(values))

    return complete


def endpoint(server: Loopback, **more: Any) -> Endpoint:
    patience = RetryPolicy(attempts=2, timeout_s=30.0)
    return Endpoint(server.url, "tiny", patience=patience, parallel=2, sleep=lambda s: None, **more)


def evolve(
    server: Loopback, folder: Path, plan: EvolutionPlan, scores: Scores | None = None, **more: Any
) -> Evolved:
    with Evolution(
        TASK, endpoint(server, **more), TextCodec(), scores or Scores(), folder
    ) as evolution:
        return evolution.run(plan)


def test_later_prompts_show_what_earlier_rounds_found(tmp_path: Path) -> None:
    with loopback(answer=improving()) as server:
        result = evolve(server, tmp_path, EvolutionPlan(rounds=3, samples=4))
    prompts = [body["messages"][0]["content"] for body in server.seen]
    assert len(prompts) == 12
    assert all("Earlier versions" not in prompt for prompt in prompts[:4])
    assert all("## Version 2" in prompt for prompt in prompts[4:])
    assert (result.rounds, result.best, result.outcomes, result.stopped) == (3, 2.5, {"ok": 12}, "")
    assert [entry.score for entry in result.winners] == sorted(
        (entry.score for entry in result.winners), reverse=True
    )
    assert result.spent.tokens == 12 * 110


def test_faults_of_a_server_cost_no_round_and_become_no_samples(tmp_path: Path) -> None:
    faults = [status(429), acts.junk, status(500), acts.half]
    with loopback(*faults, answer=improving()) as server:
        result = evolve(server, tmp_path, EvolutionPlan(rounds=2, samples=4))
    assert result.rounds == 2
    assert not result.stopped
    assert set(result.outcomes) == {"ok"}
    assert 6 <= result.outcomes["ok"] <= 8  # a prompt that met two faults went without


def test_junk_and_half_a_code_block_are_on_record_as_undecodable_and_never_shown(
    tmp_path: Path,
) -> None:
    half = answer(9.0)[:-12]
    texts = iter(["I would rather not.", half, answer(-1), answer(1.5), *[answer(2.0)] * 4])
    with loopback(answer=lambda prompt: next(texts)) as server:
        result = evolve(server, tmp_path, EvolutionPlan(rounds=2, samples=4))
    assert result.outcomes == {"undecodable": 2, "wrong": 1, "ok": 5}
    assert [entry.score for entry in result.winners] == [2.0, 1.5]
    shown = "".join(body["messages"][0]["content"] for body in server.seen[4:])
    assert "x + 9.0" not in shown
    assert "x + -1" not in shown


def test_a_server_that_is_down_ends_the_run_with_its_words_and_keeps_what_was_found(
    tmp_path: Path,
) -> None:
    with loopback(answer=improving()) as server:
        evolve(server, tmp_path, EvolutionPlan(rounds=1, samples=2))
    with loopback(status(503, body=b"out for lunch")) as server:
        result = evolve(server, tmp_path, EvolutionPlan(rounds=3, samples=2))
        assert "gave no answer to 2 prompts" in result.stopped
        assert "out for lunch" in result.stopped
        assert (result.rounds, result.best) == (1, 1.25)
    with loopback(answer=improving()) as server:
        assert evolve(server, tmp_path, EvolutionPlan(rounds=3, samples=2)).rounds == 3
        assert len(server.seen) == 4


@pytest.mark.parametrize("code", [400, 401])
def test_a_refusal_ends_the_run_with_its_words(tmp_path: Path, code: int) -> None:
    with loopback(status(code)) as server:
        assert (
            f"status {code}" in evolve(server, tmp_path, EvolutionPlan(rounds=3, samples=2)).stopped
        )
        assert len(server.seen) == 2


class Killed(BaseException):
    pass


@pytest.mark.parametrize("dies_at", range(1, 9))
def test_a_run_killed_anywhere_goes_on_without_paying_or_measuring_twice(
    tmp_path: Path, dies_at: int
) -> None:
    def run(folder: Path, dies_at: int | None) -> tuple[Evolved | None, list[str]]:
        texts: dict[int, str] = {}
        scores = Scores()
        count = [0]

        class Mortal:
            name, parallel = "mortal", 1

            def ask_all(
                self, questions: Sequence[tuple[str, int]], *, temperature: float
            ) -> list[Completion | Refusal]:
                ((_, seed),) = questions
                count[0] += 1
                if count[0] == dies_at:
                    raise Killed
                return [Completion(texts.setdefault(seed, answer(1 + seed % 97 / 10)), 1, 1, 0.5)]

        def life() -> Evolved | None:
            with Evolution(TASK, Mortal(), TextCodec(), scores, folder) as evolution:
                return evolution.run(EvolutionPlan(rounds=2, samples=4))

        try:
            result = life()
        except Killed:
            result = life()
        return result, scores.asked

    expected, measured = run(tmp_path / "whole", None)
    result, again = run(tmp_path / "killed", dies_at)
    assert result is not None
    assert expected is not None
    assert result.winners == expected.winners
    assert result.outcomes == expected.outcomes
    assert (result.spent.money, result.spent.answers) == (4.0, 8)
    assert sorted(again) == sorted(measured)


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        (Budget(tokens=5 * 110), "of 550 tokens"),
        (Budget(money=5 * 0.002), "in money"),
        (Budget(seconds=0.0), "of 0 seconds"),
    ],
)
def test_a_budget_is_kept_over_all_lives(tmp_path: Path, budget: Budget, reason: str) -> None:
    prices = TokenPrices(prompt=10.0, completion=100.0)
    plan = EvolutionPlan(rounds=9, samples=4, budget=budget)
    with loopback(answer=improving()) as server:
        for _ in range(2):
            result = evolve(server, tmp_path, plan, prices=prices)
            assert reason in result.stopped
        assert len(server.seen) <= 5
        if budget.tokens is not None:
            assert result.spent.tokens <= budget.tokens
        if budget.money is not None:
            assert result.spent.money <= budget.money


def test_a_round_cut_short_by_its_budget_is_finished_when_there_is_more(tmp_path: Path) -> None:
    with loopback(answer=improving()) as server:
        short = evolve(
            server, tmp_path, EvolutionPlan(rounds=1, samples=4, budget=Budget(tokens=250))
        )
        assert (short.rounds, short.outcomes, short.best) == (0, {"ok": 2}, 1.25)
        result = evolve(server, tmp_path, EvolutionPlan(rounds=1, samples=4))
        assert (result.rounds, result.outcomes) == (1, {"ok": 4})
        assert len(server.seen) == 4


def test_two_processes_do_not_evolve_in_one_folder(tmp_path: Path) -> None:
    with (
        loopback(answer=improving()) as server,
        Evolution(TASK, endpoint(server), TextCodec(), Scores(), tmp_path),
        pytest.raises(SettingError, match="no other process is writing"),
    ):
        Evolution(TASK, endpoint(server), TextCodec(), Scores(), tmp_path)


def test_a_local_policy_is_a_writer_too(tmp_path: Path) -> None:
    class Local:
        name = "local"

        def sample(
            self, prompts: Sequence[str], *, count: int, temperature: float, seed: int
        ) -> list[list[str]]:
            return [[answer(1.5)] * count for _ in prompts]

    with Evolution(
        TASK, LocalWriter(Local(), tokens=len), TextCodec(), Scores(), tmp_path
    ) as evolution:
        result = evolution.run(EvolutionPlan(rounds=1, samples=2, selector=Nothing()))
    assert result.best == 1.5
    assert result.spent.money == 0
    assert result.spent.tokens == 2 * (len(TextCodec().prompt(TASK)) + len(answer(1.5)))
    rows = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert {row["writer"] for row in rows if "writer" in row} == {"local"}


def test_nonsense_plans_are_refused() -> None:
    for bad in ({"rounds": 0}, {"samples": 0}, {"temperature": 0.0}):
        with pytest.raises(ValueError, match="expected rounds and samples"):
            EvolutionPlan(**bad)  # type: ignore[arg-type]


def test_a_reply_without_usage_is_estimated_and_said_to_be(tmp_path: Path) -> None:
    with loopback(reply(answer(1.5), usage=False)) as server:
        assert evolve(server, tmp_path, EvolutionPlan(rounds=1, samples=1)).spent.estimated
