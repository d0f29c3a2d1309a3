"""`cudal1 push` and `pull`: what they write, what they leave out, and with which exit code."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from tests.store.conftest import CONTRACT, HERE, make_entry
from tests.store.hub_cases import ENTRY, REPO, client, hub, list_keys
from tests.store.hub_server import HubServer
from torch_cudal1.__main__ import main
from torch_cudal1.core.settings import PREFIX
from torch_cudal1.device.target import target_for
from torch_cudal1.store.cache import quarantine
from torch_cudal1.store.cache.cache_paths import entry_path
from torch_cudal1.store.cache.local_cache import LocalCache

__all__ = ["client", "hub"]  # fixtures


@pytest.fixture
def command(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, with the environment of a user."""
    monkeypatch.setenv(PREFIX + "HUB_TIMEOUT_S", "60")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.token = "hf_secret"
    return tmp_path / "command"


def test_push_and_pull_as_commands(
    command: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    LocalCache(command / "one").put(
        dataclasses.replace(ENTRY, target=target_for(torch.device("cpu")))
    )
    assert (
        main(["push", "team/new", "--create", "--cache-dir", str(command / "one"), "--quiet"]) == 0
    )
    out, err = capsys.readouterr()
    assert err == ""  # --quiet holds for the library too
    commit = hub.repositories["team/new"].head.oid
    assert (
        out
        == f"team/new@main at {commit[:12]}: 1 entry and 0 decision records pushed, 0 there already\n"
    )
    assert hub.repositories["team/new"].private
    assert main(["pull", "team/new@main", "--cache-dir", str(command / "two"), "--quiet"]) == 0
    out = capsys.readouterr().out
    assert f"team/new@main is {commit}: 1 entry and 0 decision records here, for 1 target" in out
    assert "use them: --hub team/new@main, " in out
    assert main(["pull", "team/new", "--cache-dir", str(command / "two"), "--quiet", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["pulled"]
    assert (document["commit"], document["entries"]) == (commit, 1)
    assert main(["list", "--cache-dir", document["folders"][0], "--quiet", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["entries"]) == 1


def test_broken_revoked_and_quarantined_entries_are_never_pushed(
    command: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = LocalCache(command)
    quarantined = make_entry(region_key="34" * 32)
    for entry in (ENTRY, make_entry(), quarantined):
        cache.put(entry)
    broken = entry_path(command, make_entry().region_key, HERE, CONTRACT)
    broken.write_bytes(broken.read_bytes()[:-1])
    quarantine.quarantine_candidate(
        command,
        quarantine.QuarantineRecord(
            quarantined.region_key, quarantined.choice.digest, "wrong in production"
        ),
    )
    assert main(["push", REPO, "--cache-dir", str(command), "--quiet"]) == 1
    errors = capsys.readouterr().err
    assert f"left out: {broken}: unreadable" in errors
    assert "quarantined: wrong in production" in errors
    assert list_keys(hub) == {ENTRY.region_key}


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["push", "no-owner"], 2, "expected owner/name"),
        (["push", "../x/y"], 2, "expected owner/name"),
        (["push", f"{REPO}@{'0' * 40}"], 2, "a branch to push to, not a commit"),
        (["push", REPO], 2, "at least one whole entry"),
        (["push", REPO, "--offline"], 2, "at least one whole entry"),
        (["pull", REPO, "--offline"], 1, "nothing was pulled: the setting 'offline' is on"),
        (["pull", "team/none"], 1, "no such repository, or no right to read it"),
        (["pull", f"{REPO}@none"], 1, "the Hub has no such revision"),
    ],
)
def test_wrong_use_is_said(
    arguments: list[str], code: int, reason: str, command: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--cache-dir", str(command), "--quiet"]) == code
    assert reason in capsys.readouterr().err


def test_offline_pushes_nothing_and_asks_nothing(
    command: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    LocalCache(command).put(ENTRY)
    assert (
        main(["push", REPO, "--create", "--offline", "--cache-dir", str(command), "--quiet"]) == 1
    )
    assert "push failed: the setting 'offline' is on" in capsys.readouterr().err
    assert hub.requests == []


def test_nothing_is_pushed_without_the_right_to(
    command: Path,
    hub: HubServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", "another")
    LocalCache(command).put(ENTRY)
    assert main(["push", REPO, "--cache-dir", str(command), "--quiet"]) == 1
    assert "push failed: team/kernels@main: the Hub answered 403" in capsys.readouterr().err
