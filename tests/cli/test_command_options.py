"""Options of single commands: their defaults, what excludes each other, and values that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torch_cudal1.cli.parser import parser

DEFAULTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "push": (["team/x"], {"create": False, "message": "Entries of torch-cudal1"}),
    "pull": (["team/x"], {"family": []}),
    "demo": ([], {"out": Path("cudal1-demo.html"), "only": [], "total_s": 225.0}),
    "explain": (["t.py"], {"fail_on_miss": False}),
    "plan": (["t.py"], {"compare": False, "recorded": None, "prices": None}),
    "warmup": (
        ["t.py"],
        {"with_inductor": False, "devices": None, "workers": None, "cluster": None},
    ),
    "purge": ([], {"key": [], "broken": False, "unused": False, "yes": False}),
    "lock": ([], {"target": [], "check": False, "lock": Path("cudal1.lock")}),
    "export": (["b"], {"bundle": Path("b"), "key": [], "lock": None}),
    "import": (["b"], {"bundle": Path("b")}),
    "coverage": (["t.py"], {"target": ["t.py"], "sku": None, "torch": None}),
    "import-kernels": (["p"], {"path": [Path("p")], "reference": None, "json": False}),
    "export-kernels": (["t.py"], {"out": Path("flashinfer-trace")}),
    "keys": (["list"], {"action": "list", "name": None, "out": None}),
    "sign": (["k.pem"], {"keyfile": Path("k.pem"), "key": []}),
    "revoke": (["ab", "--reason", "x"], {"what": ["ab"], "reason": "x"}),
    "judge": (["r.py", "c.py"], {"profile": "fast", "inference": False, "json": False}),
}


@pytest.mark.parametrize("command", DEFAULTS)
def test_options_that_are_not_given_have_their_defaults(command: str) -> None:
    arguments, defaults = DEFAULTS[command]
    args = parser().parse_args([command, *arguments])
    assert {name: getattr(args, name) for name in defaults} == defaults


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["pull", "team/x", "--family", "all", "--family", "cpu"], "family", ["all", "cpu"]),
        (["demo", "--only", "A", "--only", "B"], "only", ["A", "B"]),
        (["demo", "--budget-s", "10"], "total_s", 10.0),
        (["warmup", "t.py", "--cluster"], "cluster", "auto"),
        (["warmup", "t.py", "--cluster", "ray://head:1"], "cluster", "ray://head:1"),
        (["warmup", "t.py", "--workers", "3"], "workers", 3),
        (["judge", "a", "b", "--json"], "json", True),
        (["judge", "a", "b", "--json", "o.json"], "json", Path("o.json")),
        (["judge", "a", "b", "--contract", "strict"], "precision", "strict"),
        (["import-kernels", "p", "--json", "o.json"], "json", Path("o.json")),
    ],
)
def test_a_given_option_reaches_its_command(arguments: list[str], name: str, value: object) -> None:
    assert getattr(parser().parse_args(arguments), name) == value


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["warmup", "t.py", "--workers", "0"], "'0' is not a whole number above 0"),
        (["warmup", "t.py", "--workers", "two"], "invalid"),
        (["warmup", "t.py", "--workers", "2", "--devices", "all"], "not allowed with"),
        (["purge", "--yes", "--dry-run"], "not allowed with"),
        (["revoke", "ab"], "--reason"),
        (["keys", "add"], "invalid choice"),
        (["judge", "a", "b", "--limit", "-1"], "is not a whole number above 0"),
        (["coverage"], "WHAT"),
    ],
)
def test_wrong_usage_is_refused_with_the_option(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(arguments)
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err
