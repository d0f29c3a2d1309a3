"""A pull brings every file of the families asked for and moves the pin, past what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.store.conftest import HERE, make_entry
from tests.store.hub_cases import ENTRY, again, client, found, hub, pushed, settings
from tests.store.hub_server import HubServer
from torch_cudal1.core.settings import Settings
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.hub.hub_pull import PullReport, pull

__all__ = ["client", "hub"]  # fixtures


def pulled(given: Settings, families: list[str] | None = None) -> PullReport:
    done = pull(again(given).hub, families, lambda what, fraction: None)
    assert isinstance(done, PullReport), done
    return done


def test_a_pull_brings_everything_and_moves_the_pin(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed(tmp_path / "one", ENTRY, record={"regions": [ENTRY.region_key]})
    given = settings(tmp_path / "two")
    first = pulled(given)
    assert (first.entries, first.records, first.refused, first.problem) == (1, 1, (), "")
    second = pushed(tmp_path / "one", make_entry()).commit
    assert pulled(given).commit == second
    hub.requests.clear()
    there = again(given)
    found(there)
    assert hub.requests == []  # all is here, and the pin leads to it
    (folder,) = first.folders
    assert len(list(LocalCache(folder).entries())) == 1  # an ordinary cache folder


def test_a_pull_takes_only_the_families_asked_for(hub: HubServer, tmp_path: Path) -> None:
    gpu = dataclasses.replace(HERE, device="cuda", arch="sm_90", sku="NVIDIA H200")
    pushed(tmp_path / "one", ENTRY, dataclasses.replace(ENTRY, target=gpu))
    assert pulled(settings(tmp_path / "two"), ["cuda-sm_90"]).entries == 1
    assert pulled(settings(tmp_path / "three"), ["cuda-sm_80"]).folders == ()
    assert pulled(settings(tmp_path / "four")).entries == 2


def test_a_refused_file_does_not_stop_the_rest(hub: HubServer, tmp_path: Path) -> None:
    pushed(tmp_path / "one", ENTRY, make_entry())
    hub.faults.body[f"{ENTRY.region_key}.safetensors"] = lambda data: (
        data[:-1] + bytes([data[-1] ^ 1])
    )
    done = pulled(settings(tmp_path / "two"))
    assert done.entries == 1
    (reason,) = done.refused
    assert f"{ENTRY.region_key}.safetensors: sha256 is" in reason


def test_a_hub_that_stops_halfway_leaves_the_pin_and_what_came(
    hub: HubServer, tmp_path: Path
) -> None:
    pushed(tmp_path / "one", ENTRY)
    given = settings(tmp_path / "two")
    first = pulled(given)
    pushed(tmp_path / "one", make_entry())
    hub.faults.status[".safetensors"] = (500, -1)
    done = pulled(given)
    assert not done.complete
    assert "1 files did not come" in done.problem
    assert again(given).hub.read_pin() == first.commit
    hub.faults.status.clear()
    assert pulled(given).entries == 2
