"""Options of `cudal1 generate`: a server must be named, and every limit is a positive number."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_cudal1.cli.parser import parser

COMMAND = ["generate", "task.py", "--llm", "http://localhost:8000/v1"]


def test_a_search_has_the_papers_selector_and_no_limits_by_default() -> None:
    args = parser().parse_args(COMMAND)
    assert (args.target, args.llm, args.llm_model) == (["task.py"], COMMAND[-1], "")
    assert (args.rounds, args.samples, args.temperature, args.seed) == (8, 8, 0.8, 0)
    assert (args.selector, args.checker, args.keep) == ("bucket", "rules", 3)
    assert (args.total_s, args.tokens, args.money, args.limit) == (None, None, None, None)
    assert (args.price_prompt, args.price_completion) == (0.0, 0.0)
    assert args.out == Path("cudal1-generate")


def test_no_server_is_asked_unless_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["generate", "task.py"])
    assert "--llm" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--rounds", "--samples", "--temperature", "--budget-s", "--tokens", "--max-tokens"]
)
@pytest.mark.parametrize("value", ["0", "-1", "nan", "1e13", "many"])
def test_a_limit_is_a_number_above_zero(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args([*COMMAND, f"{option}={value}"])
    assert caught.value.code == 2
    assert option in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--price-prompt", "--price-completion"])
def test_a_price_may_be_nothing_and_not_less(option: str) -> None:
    name = option.removeprefix("--").replace("-", "_")
    assert getattr(parser().parse_args([*COMMAND, option, "0"]), name) == 0.0
    with pytest.raises(SystemExit):
        parser().parse_args([*COMMAND, f"{option}=-0.1"])
