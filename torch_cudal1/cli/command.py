"""The type of a command of the command line, and the commands that other packages add.

An installed package (this one for its training, which nothing else imports) adds a command by an
entry point of the group `torch_cudal1.commands` whose object is a `Command`. It is loaded for
every command line: its module imports nothing heavy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

__all__ = ["GROUP", "Command", "load_plugins"]

# The group is a promise to other packages: renaming it would lose their commands.
GROUP = "torch_cudal1.commands"


@dataclass(frozen=True)
class Command:
    """A command: `function` of `module` is called with the arguments, the settings and the screen,
    and returns an exit code.

    `module` is imported when the command runs; a leading dot means one of
    `torch_cudal1.cli.commands`. `options` add arguments to a parser.
    """

    name: str
    # Names, not the function: `cudal1 --help` must not import torch.
    module: str
    function: str
    summary: str
    options: tuple[Callable[[argparse.ArgumentParser], Any], ...]


def load_plugins() -> list[Command]:
    """The commands that installed packages add, by name. Raises TypeError for an entry point that
    is no `Command`.
    """
    commands = []
    # Sorted: the order of installed distributions differs between machines.
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        command = point.load()
        # A wrong plugin fails at once and by name, not with an AttributeError inside argparse.
        if not isinstance(command, Command):
            raise TypeError(
                f"entry point {point.value!r} of group {GROUP!r} is a {type(command).__name__}; expected a Command"
            )
        commands.append(command)
    return commands
