"""Push: one commit with entries and index, on top of whatever others commit meanwhile, nothing
broken in it. Pull: all of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

import torch_cudal1
from tests.entries import plant
from tests.signing import allow, make_signer
from tests.store.conftest import CONTRACT, HERE, make_entry
from tests.store.hub_cases import (
    ENTRY,
    NAME,
    OTHER,
    REGION,
    REPO,
    client,
    find_hit,
    hub,
    list_keys,
    push_entries,
    settings,
    source,
)
from tests.store.hub_server import HubServer
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Entry
from torch_cudal1.search.tune import choose
from torch_cudal1.store.cache.cache_paths import entry_path
from torch_cudal1.store.cache.inventory import take_inventory
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.context import make_context
from torch_cudal1.store.hub import hub_layout, hub_push
from torch_cudal1.store.hub.hub_client import HubFailure
from torch_cudal1.store.hub.hub_layout import (
    ROOT_INDEX,
    Root,
    Shard,
    TargetIndex,
    shard_file,
    target_id,
    target_index_file,
)
from torch_cudal1.store.hub.hub_push import list_offers, push

__all__ = ["client", "hub"]  # fixtures


def list_index(hub: HubServer) -> dict[str, str]:
    """Every file that the index of the repository leads to, with its digest, read as a client
    would.
    """
    files = hub.repositories[REPO].head.files
    root = Root.read(files[ROOT_INDEX])
    assert isinstance(root, Root), root
    rows: dict[str, str] = {}
    for name, (target, row) in root.targets.items():
        rows[target_index_file(name)] = row.sha256
        index = TargetIndex.read(files[target_index_file(name)])
        assert isinstance(index, TargetIndex), index
        for contract, shards in index.shards.items():
            for prefix, of_shard in shards.items():
                rows[shard_file(name, contract, prefix)] = of_shard.sha256
                shard = Shard.read(files[shard_file(name, contract, prefix)])
                assert isinstance(shard, Shard), shard
                for kind, part in (("entry", shard.entries), ("alias", shard.records)):
                    assert {index.find_shard_prefix(contract, key) for key in part} <= {
                        prefix
                    }  # where a look-up asks for it
                    rows |= {
                        hub_layout.repository_file(kind, key, target, contract): listing.sha256
                        for key, listing in part.items()
                    }
    return rows


def is_consistent(hub: HubServer) -> bool:
    """Whether the index names exactly the files that are there, with their digests."""
    there = {
        path: hashlib.sha256(content).hexdigest()
        for path, content in hub.repositories[REPO].head.files.items()
        if path.startswith("targets/")
    }
    return there == list_index(hub)


def offer_entries(folder: Path, *entries: Entry) -> tuple[hub_push.Offer, ...]:
    cache = LocalCache(folder)
    for entry in entries:
        cache.put(entry)
    return list_offers(take_inventory(cache))


# Push
# --------------------------------------------------------------------------------------------------------------------------


def test_a_push_is_one_commit_with_index_and_entries(hub: HubServer, tmp_path: Path) -> None:
    before = len(hub.repositories[REPO].commits)
    report = push_entries(
        tmp_path, ENTRY, make_entry(), dataclasses.replace(ENTRY, target=OTHER)
    )  # the third replaces the first in a cache
    assert (report.entries, report.unchanged, report.kept, report.left_out) == (2, 0, 0, ())
    assert len(hub.repositories[REPO].commits) == before + 1
    assert hub.repositories[REPO].head.oid == report.commit
    assert hub.repositories[REPO].head.files["README.md"] == b"kernels"
    assert is_consistent(hub)


def test_what_is_there_already_makes_no_commit(hub: HubServer, tmp_path: Path) -> None:
    first = push_entries(tmp_path, ENTRY)
    second = push_entries(tmp_path, ENTRY)
    assert (second.commit, second.entries, second.unchanged) == (first.commit, 0, 1)


def test_a_server_without_the_librarys_own_storage_is_told_as_such(
    hub: HubServer, tmp_path: Path, monkeypatch
) -> None:
    pytest.importorskip("hf_xet", reason="the library's own storage protocol is not installed")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)  # as a user's process has it
    LocalCache(tmp_path).put(ENTRY)
    opened = source(settings(tmp_path, cache_dir=tmp_path, hub_timeout_s=600.0)).hub
    answer = push(
        opened.client,
        opened.repo,
        list_offers(take_inventory(LocalCache(tmp_path))),
        message="test",
    )
    assert isinstance(answer, HubFailure)
    assert "HF_HUB_DISABLE_XET=1" in answer.reason
    assert len(hub.repositories[REPO].commits) == 1, "nothing was committed"


def test_a_push_between_ours_and_its_parent_is_not_lost(hub: HubServer, tmp_path: Path) -> None:
    hub.faults.before_commit.append(
        lambda: push_entries(tmp_path / "theirs", make_entry()) and None
    )
    report = push_entries(tmp_path / "ours", ENTRY)
    assert report.entries == 1
    assert list_keys(hub) == {ENTRY.region_key, make_entry().region_key}
    assert is_consistent(hub)


def test_many_who_push_at_once_lose_nothing(hub: HubServer, tmp_path: Path) -> None:
    entries = [make_entry(region_key=f"{i:02x}" * 32) for i in range(4)]
    offers = [offer_entries(tmp_path / str(i), entry) for i, entry in enumerate(entries)]
    opened = source(settings(tmp_path)).hub
    answers: list[object] = []
    threads = [
        threading.Thread(
            target=lambda o=o: answers.append(push(opened.client, opened.repo, o, message="x"))
        )
        for o in offers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer for answer in answers if isinstance(answer, HubFailure)] == []
    assert list_keys(hub) == {entry.region_key for entry in entries}
    assert is_consistent(hub)


def test_a_branch_that_never_stands_still_is_given_up(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_push, "_PAUSE_S", 0.0)
    hub.faults.before_commit += [
        lambda i=i: hub.repositories[REPO].add({"n": b"%d" % i}) and None for i in range(20)
    ]
    opened = source(settings(tmp_path)).hub
    answer = push(opened.client, opened.repo, offer_entries(tmp_path / "c", ENTRY), message="x")
    assert isinstance(answer, HubFailure)
    assert answer.kind == "overtaken"
    assert "another commit came first (412)" in answer.reason


@pytest.mark.parametrize(
    ("their_time", "our_time", "wins"),
    [
        ("2025-02", "2025-01", "theirs"),
        ("2025-01", "2025-02", "ours"),
        ("2999-01", "2025-01", "ours"),
    ],
)
def test_the_later_entry_stays_unless_its_clock_is_wrong(
    their_time: str, our_time: str, wins: str, hub: HubServer, tmp_path: Path
) -> None:
    day = "-01T00:00:00+00:00"
    push_entries(
        tmp_path / "theirs", dataclasses.replace(ENTRY, package="theirs", created=their_time + day)
    )
    report = push_entries(
        tmp_path / "ours", dataclasses.replace(ENTRY, package="ours", created=our_time + day)
    )
    assert (report.entries, report.kept) == ((0, 1) if wins == "theirs" else (1, 0))
    assert find_hit(source(settings(tmp_path / "two"))).entry.package == wins


def test_a_large_shard_becomes_many_and_every_entry_is_found(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_layout, "SPLIT_ROWS", 3)
    entries = [
        make_entry(region_key=f"{i:x}{j:x}" * 32)
        for i, j in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0))
    ]
    push_entries(tmp_path, *entries[:3])
    assert shard_file(target_id(HERE), CONTRACT.digest, "") in hub.repositories[REPO].head.files
    push_entries(tmp_path, *entries[3:])
    shards = {
        path.split("/")[-1] for path in hub.repositories[REPO].head.files if "/index/" in path
    }
    assert shards == {
        "00.json",
        "01.json",
        "02.json",
        "03.json",
        "1.json",
        "2.json",
    }  # "all" is gone, in the same commit
    assert is_consistent(hub)
    push_entries(
        tmp_path, ENTRY, make_entry(region_key="04" * 32)
    )  # under prefixes that no shard covers yet
    assert is_consistent(hub)
    shards_now = {
        path.split("/")[-1] for path in hub.repositories[REPO].head.files if "/index/" in path
    }
    assert shards_now == shards | {"all.json"}
    find_hit(source(settings(tmp_path / "two")))


def test_a_file_that_changes_while_it_is_pushed_is_left_out(hub: HubServer, tmp_path: Path) -> None:
    offers = offer_entries(tmp_path / "c", ENTRY, make_entry())
    path = entry_path(tmp_path / "c", ENTRY.region_key, HERE, CONTRACT)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    opened = source(settings(tmp_path)).hub
    report = push(opened.client, opened.repo, offers, message="x")
    assert not isinstance(report, HubFailure)
    assert [(broken.path, broken.reason) for broken in report.left_out] == [
        (path, "it changed while it was pushed; push again")
    ]
    assert list_keys(hub) == {make_entry().region_key}
    assert is_consistent(hub)


@pytest.mark.parametrize(
    ("limit", "created", "rule"),
    [(100, "2025-01-01T00:00:00+00:00", "bytes"), (1 << 30, "2" * 41, "a time")],
)
def test_what_no_reader_would_take_is_left_out(
    limit: int,
    created: str,
    rule: str,
    hub: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub_layout, "FILE_LIMIT_BYTES", limit)
    report = push_entries(tmp_path, dataclasses.replace(ENTRY, created=created))
    (left_out,) = report.left_out
    assert "an index cannot list it" in left_out.reason
    assert rule in left_out.reason
    assert list_keys(hub) == set()


@pytest.mark.parametrize("part", ["/preupload/", "/objects/batch", "/storage/", "/commit/"])
def test_a_hub_that_does_not_take_it_is_a_reason_and_changes_nothing(
    part: str, hub: HubServer, tmp_path: Path
) -> None:
    hub.faults.status[part] = (403, -1)
    head = hub.repositories[REPO].head.oid
    opened = source(settings(tmp_path)).hub
    answer = push(opened.client, opened.repo, offer_entries(tmp_path / "c", ENTRY), message="x")
    assert isinstance(answer, HubFailure)
    assert f"{REPO}@main: " in answer.reason
    assert "may have arrived" not in answer.reason
    assert hub.repositories[REPO].head.oid == head


@pytest.mark.parametrize("arrived", [True, False])
def test_a_commit_whose_answer_is_lost_is_looked_for_before_it_is_sent_again(
    arrived: bool, hub: HubServer, tmp_path: Path
) -> None:
    hub.faults.lost_answers = 1 if arrived else 0
    hub.faults.status["/commit/"] = (500, 0 if arrived else 1)
    before = len(hub.repositories[REPO].commits)
    report = push_entries(tmp_path, ENTRY)
    assert (report.entries, report.commit) == (1, hub.repositories[REPO].head.oid)
    assert len(hub.repositories[REPO].commits) == before + 1
    assert is_consistent(hub)


def test_a_commit_that_is_never_answered_is_said_to_be_in_doubt(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.faults.status["/commit/"] = (500, -1)
    opened = source(settings(tmp_path)).hub
    answer = push(opened.client, opened.repo, offer_entries(tmp_path / "c", ENTRY), message="x")
    assert isinstance(answer, HubFailure)
    assert "the Hub answered 500" in answer.reason
    assert "push again, what is there is not sent twice" in answer.reason


def test_a_push_does_not_write_over_an_index_it_cannot_read(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories[REPO].add({ROOT_INDEX: b'{"weight_map": {}}'})
    opened = source(settings(tmp_path)).hub
    answer = push(opened.client, opened.repo, offer_entries(tmp_path / "c", ENTRY), message="x")
    assert isinstance(answer, HubFailure)
    assert "index.json: not an index of this package" in answer.reason


def test_decision_records_go_with_the_target_of_all_they_speak_of(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path)
    there = make_entry(region_key="12" * 32, target=OTHER, package="other")
    for entry in (ENTRY, there):
        cache.put(entry)
    cache.put_decision_record(NAME, {"regions": [ENTRY.region_key]}, HERE, CONTRACT)
    cache.put_decision_record(
        "ef" * 32, {"regions": [ENTRY.region_key, there.region_key]}, HERE, CONTRACT
    )
    offers = list_offers(take_inventory(cache))
    assert sorted((offer.kind, offer.key[:2], offer.target.sku) for offer in offers) == [
        ("alias", "cd", HERE.sku),
        ("entry", "12", OTHER.sku),
        ("entry", ENTRY.region_key[:2], HERE.sku),
    ]
    assert list_offers(take_inventory(cache), ["cuda-sm_90"]) == ()


# The pipeline and the command line
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def here(hub: HubServer, tmp_path: Path) -> Entry:
    """An entry for this machine, in the repository."""
    place = make_context(torch.device("cpu"), Settings(cache_dir=tmp_path / "none"))
    entry = dataclasses.replace(ENTRY, target=place.target, contract=place.contract)
    push_entries(tmp_path / "one", entry)
    return entry


def test_the_pipeline_asks_the_hub_after_the_cache_and_survives_it(
    here: Entry, hub: HubServer, tmp_path: Path
) -> None:
    hub.faults.status["/storage/"] = (500, -1)
    choice = choose(REGION, make_context(torch.device("cpu"), settings(tmp_path / "two")))
    assert not choice.swapped
    assert f"hub: {REPO}@" in choice.reason
    assert "the Hub answered 500" in choice.reason
    hub.faults.status.clear()
    reader_settings = settings(tmp_path / "three")
    place = make_context(torch.device("cpu"), reader_settings)
    assert [each.name for each in place.sources] == ["local cache", "hub"]
    choose(REGION, place)
    assert len(hub.list_requests(f"{here.region_key}.safetensors", "GET")) > 0
    assert [path.name for path in reader_settings.cache_dir.rglob("*.safetensors")] == [
        f"{here.region_key}.safetensors"
    ]
    assert isinstance(place.find_decision_record(NAME), Refusal)
    assert [
        each.name for each in make_context(torch.device("cpu"), reader_settings.but(hub="")).sources
    ] == ["local cache"]


def test_a_model_runs_what_a_team_pushed_and_signed(hub: HubServer, tmp_path: Path) -> None:
    model, inputs = (
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval(),
        torch.randn(4, 8),
    )
    cache, signer = LocalCache(tmp_path / "one"), make_signer(tmp_path)
    with torch.no_grad():
        expected = model(inputs)
        plant(model, inputs, cache.root)
        cache.sign(signer)
        opened = source(settings(tmp_path, cache_dir=cache.root)).hub
        assert not isinstance(
            push(opened.client, opened.repo, list_offers(take_inventory(cache)), message="x"),
            HubFailure,
        )
        allow(tmp_path / "publishers.toml", team=signer.public)
        reader_settings = settings(
            tmp_path / "two",
            strictness="error",
            on_miss="error",
            publishers=tmp_path / "publishers.toml",
        )
        served = torch_cudal1.accelerate(model, inputs, settings=reader_settings)
        assert torch.equal(served(inputs), expected)
        planned = torch_cudal1.plan(
            model, inputs, reader_settings.but(cache_dir=tmp_path / "three")
        )
        (row,) = torch_cudal1.explain(served).regions
        torch_cudal1.restore(model)
    assert "planted" in str(row)
    assert [row.cached for row in planned.rows if row.share_of_time is not None] == [
        True
    ]  # a plan asks the team too
    assert not (
        reader_settings.cache_dir / "v1"
    ).exists()  # nothing was searched, measured or remembered: the team's decision serves
