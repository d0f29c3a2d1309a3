"""A pull brings every file of the families asked for and moves the pin, past what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.store.conftest import HERE, make_entry
from tests.store.hub_cases import ENTRY, client, find_hit, hub, push_entries, reopen, settings
from tests.store.hub_server import HubServer
from torch_cudal1.core.settings import Settings
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.hub.hub_pull import PullReport, pull

__all__ = ["client", "hub"]  # fixtures


def pull_all(reader_settings: Settings, families: list[str] | None = None) -> PullReport:
    report = pull(reopen(reader_settings).hub, families, lambda activity, fraction: None)
    assert isinstance(report, PullReport), report
    return report


def test_a_pull_brings_everything_and_moves_the_pin(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_entries(tmp_path / "one", ENTRY, record={"regions": [ENTRY.region_key]})
    reader_settings = settings(tmp_path / "two")
    first = pull_all(reader_settings)
    assert (first.entries, first.records, first.refused, first.problem) == (1, 1, (), "")
    second = push_entries(tmp_path / "one", make_entry()).commit
    assert pull_all(reader_settings).commit == second
    hub.requests.clear()
    there = reopen(reader_settings)
    find_hit(there)
    assert hub.requests == []  # all is here, and the pin leads to it
    (folder,) = first.folders
    assert len(list(LocalCache(folder).iter_entries())) == 1  # an ordinary cache folder


def test_a_pull_takes_only_the_families_asked_for(hub: HubServer, tmp_path: Path) -> None:
    gpu = dataclasses.replace(HERE, device="cuda", arch="sm_90", sku="NVIDIA H200")
    push_entries(tmp_path / "one", ENTRY, dataclasses.replace(ENTRY, target=gpu))
    assert pull_all(settings(tmp_path / "two"), ["cuda-sm_90"]).entries == 1
    assert pull_all(settings(tmp_path / "three"), ["cuda-sm_80"]).folders == ()
    assert pull_all(settings(tmp_path / "four")).entries == 2


def test_a_refused_file_does_not_stop_the_rest(hub: HubServer, tmp_path: Path) -> None:
    push_entries(tmp_path / "one", ENTRY, make_entry())
    hub.faults.body[f"{ENTRY.region_key}.safetensors"] = lambda content: (
        content[:-1] + bytes([content[-1] ^ 1])
    )
    report = pull_all(settings(tmp_path / "two"))
    assert report.entries == 1
    (reason,) = report.refused
    assert f"{ENTRY.region_key}.safetensors: sha256 is" in reason


def test_a_hub_that_stops_halfway_leaves_the_pin_and_what_came(
    hub: HubServer, tmp_path: Path
) -> None:
    push_entries(tmp_path / "one", ENTRY)
    reader_settings = settings(tmp_path / "two")
    first = pull_all(reader_settings)
    push_entries(tmp_path / "one", make_entry())
    hub.faults.status[".safetensors"] = (500, -1)
    report = pull_all(reader_settings)
    assert not report.complete
    assert "1 files did not come" in report.problem
    assert reopen(reader_settings).hub.read_pin() == first.commit
    hub.faults.status.clear()
    assert pull_all(reader_settings).entries == 2
