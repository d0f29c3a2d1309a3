"""Test helper: a repository on a loopback server, the real client, and sources that ask it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

from tests.store.conftest import CONTRACT, HERE, make_entry, program
from tests.store.hub_server import HubServer, Repository, serving
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Candidate, Contract, Entry, Region, Target
from torch_cudal1.store.cache.inventory import take_inventory
from torch_cudal1.store.cache.local_cache import Hit, LocalCache
from torch_cudal1.store.hub import hub_source as hub_module
from torch_cudal1.store.hub.hub_push import PushReport, list_offers, push
from torch_cudal1.store.hub.hub_source import HubSource, open_hub_source

REPO = "team/kernels"


REGION = Region(program(), ("input",), name="block")


NAME = "cd" * 32


OTHER = dataclasses.replace(HERE, sku="Another CPU")


ENTRY = make_entry(region_key=REGION.key, choice=Candidate(program(), "eager", "baseline"))


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The library without this machine's tokens, and a process that has not asked yet."""
    monkeypatch.setattr(
        constants, "HF_HUB_DISABLE_XET", True
    )  # its storage protocol is not HTTP alone
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    without_proxy(monkeypatch)
    hub_module._open.cache_clear()
    yield
    hub_module._open.cache_clear()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving() as server:
        use(server, monkeypatch)
        server.repositories[REPO] = Repository()
        server.repositories[REPO].add({"README.md": b"kernels"})
        yield server


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a repository to which `ENTRY` was pushed."""
    with serving() as server, pytest.MonkeyPatch.context() as patch:
        use(server, patch)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        server.repositories[REPO] = Repository()
        server.repositories[REPO].add({"README.md": b"kernels"})
        push_entries(tmp_path_factory.mktemp("pushed"), ENTRY)
        return server.repositories[REPO].head.files


@pytest.fixture
def filled_hub(hub: HubServer, repository: dict[str, bytes]) -> HubServer:
    """The server with that repository."""
    hub.repositories[REPO].add(repository)
    return hub


def without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loopback is asked directly, whatever this machine's proxies are; the library's session is
    made anew with that.
    """
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1,localhost")
    close_session()


def use(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT does, for a library that is loaded already."""
    without_proxy(monkeypatch)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        server.url + "/{repo_id}/resolve/{revision}/{filename}",
    )


def settings(folder: Path, **changes: object) -> Settings:
    return Settings(
        **{"cache_dir": folder / "cache", "hub": REPO, "hub_timeout_s": 60.0, **changes}
    )


def source(asked_settings: Settings) -> HubSource:
    hub_source = open_hub_source(asked_settings)
    assert hub_source is not None
    return hub_source


def reopen(asked_settings: Settings) -> HubSource:
    """The source as a new process has it: nothing in memory, everything on the disk."""
    hub_module._open.cache_clear()
    return source(asked_settings)


def push_entries(folder: Path, *entries: Entry, record: dict | None = None) -> PushReport:
    """Push entries (and a decision record) from a cache of their own."""
    cache = LocalCache(folder)
    for entry in entries:
        cache.put(entry)
    if record is not None:
        cache.put_decision_record(NAME, record, entries[0].target, entries[0].contract)
    opened = source(settings(folder, cache_dir=folder)).hub
    report = push(opened.client, opened.repo, list_offers(take_inventory(cache)), message="test")
    assert isinstance(report, PushReport), report
    return report


def find_hit(source: HubSource, target: Target = HERE, contract: Contract = CONTRACT) -> Hit:
    hit = source.find(REGION, target, contract)
    assert isinstance(hit, Hit), hit
    return hit


def find_miss(source: HubSource, target: Target = HERE, contract: Contract = CONTRACT) -> str:
    miss = source.find(REGION, target, contract)
    assert isinstance(miss, Refusal), miss
    return miss.reason


def replace_files(hub: HubServer, change: Callable[[dict[str, bytes]], None]) -> None:
    """A commit by somebody else, who may write anything."""
    files = dict(hub.repositories[REPO].head.files)
    change(files)
    hub.repositories[REPO].add(files)


def list_keys(hub: HubServer) -> set[str]:
    """The keys of the entries in the repository."""
    return {
        path.split("/")[-1].removesuffix(".safetensors")
        for path in hub.repositories[REPO].head.files
        if path.endswith(".safetensors")
    }
