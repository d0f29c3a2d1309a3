"""The options of `cudal1 train`."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from torch_cudal1.training.options import COMMAND


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for add_options in COMMAND.options:
        add_options(parser)
    return parser.parse_args(arguments)


def test_options_that_are_left_out_leave_the_settings_of_a_run_as_they_are():
    args = parse("rl")
    assert args.run_folder == Path("cudal1-train")
    settings = ("seed", "model", "selector", "steps", "landscape", "tasks", "device", "lanes")
    assert [name for name in settings if getattr(args, name) is not None] == []
    assert args.generator == []
    assert not args.live


def test_every_option_has_the_type_that_its_setting_has():
    args = parse(
        *("experiment", "--plan", "p.json", "--seed", "3", "--workers", "2", "--budget-s", "1.5"),
        *("--generator", "http://a", "--generator", "b", "--lanes", "4", "--steps", "7"),
    )
    assert (args.plan, args.seed, args.workers, args.total_s) == (Path("p.json"), 3, 2, 1.5)
    assert (args.generator, args.lanes, args.steps) == (["http://a", "b"], 4, 7)


@pytest.mark.parametrize("arguments", [(), ("fly",), ("rl", "--selector", "luck")])
def test_an_action_or_a_value_that_there_is_not_is_refused(arguments: tuple[str, ...]):
    with pytest.raises(SystemExit):
        parse(*arguments)
