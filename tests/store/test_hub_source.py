"""A Hub repository as a source, asked by the real client over a loopback server: what is found,
refused, and not asked for.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.signing import allow, make_signer
from tests.store.conftest import CONTRACT, HERE, make_entry
from tests.store.hub_cases import (
    ENTRY,
    NAME,
    OTHER,
    REGION,
    REPO,
    client,
    filled_hub,
    find_hit,
    find_miss,
    hub,
    push_entries,
    reopen,
    replace_files,
    repository,
    settings,
    source,
)
from tests.store.hub_server import HubServer, serving
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.settings import PREFIX, Settings
from torch_cudal1.ir.records import Contract, Entry
from torch_cudal1.store.cache.entry_file import encode_entry
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.hub.hub_client import HubFailure, Repo
from torch_cudal1.store.hub.hub_layout import (
    ROOT_INDEX,
    repository_file,
    target_id,
    target_index_file,
)
from torch_cudal1.store.hub.hub_source import list_mirrored_roots

__all__ = ["client", "filled_hub", "hub", "repository"]  # fixtures

# What is found
# -----------------------------------------------------------------------------------------------------------------


def test_what_one_machine_pushed_another_finds(hub: HubServer, tmp_path: Path) -> None:
    record = {"candidates": [ENTRY.choice.digest], "winner": "cudal1"}
    report = push_entries(tmp_path / "one", ENTRY, record=record)
    assert (report.entries, report.records) == (1, 1)
    there = source(settings(tmp_path / "two"))
    hit = find_hit(there)
    assert hit.entry.choice == ENTRY.choice
    assert Path(hit.where).is_relative_to(tmp_path / "two" / "cache" / "hub")
    assert not (tmp_path / "two" / "cache" / "v1").exists()  # never among the user's own
    assert "nobody signed it" in str(
        hit.stale
    )  # whom to believe is asked as of any folder from elsewhere


def test_a_look_up_reads_three_small_files_and_lists_nothing(
    hub: HubServer, tmp_path: Path
) -> None:
    push_entries(tmp_path / "one", ENTRY, *(make_entry(region_key=f"{i:064x}") for i in range(20)))
    hub.requests.clear()
    there = source(settings(tmp_path / "two"))
    find_hit(there)
    files = [
        path.split("/resolve/")[1].partition("/")[2] for path in hub.list_requests("/resolve/")
    ]
    name = target_id(HERE)
    entry_path = repository_file("entry", REGION.key, HERE, CONTRACT.digest)
    assert files == [
        ROOT_INDEX,
        target_index_file(name),
        f"targets/{name}/index/{CONTRACT.digest}/all.json",
        entry_path,
    ]
    assert hub.list_requests("tree") == hub.list_requests("paths-info") == []
    (api,) = hub.list_requests("/api/")
    assert api == f"/api/models/{REPO}/revision/main"
    before = len(hub.requests)
    find_hit(there)
    assert find_miss(there, contract=Contract("strict")) == "absent"
    assert (
        len(hub.requests) == before
    )  # what is here is not asked for again, and what the index lacks never


def test_a_second_process_without_network_finds_what_the_first_fetched(
    filled_hub: HubServer, tmp_path: Path
) -> None:
    reader_settings = settings(tmp_path / "two")
    find_hit(source(reader_settings))
    requests_before = len(filled_hub.requests)
    code = (
        "from tests.store.hub_cases import REGION, HERE, CONTRACT\n"
        "from torch_cudal1.ir.records import Target, Contract\n"
        "from torch_cudal1.core.settings import Settings\n"
        "from torch_cudal1.store.hub.hub_source import open_hub_source\n"
        "source = open_hub_source(Settings.from_env())\n"
        "print(source.find(REGION, HERE, CONTRACT).entry.choice.label)\n"
        "print(source.find_decision_record('ef' * 32, HERE, CONTRACT).reason)\n"
        "print(source.hub.open_latest().reason)\n"
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith((PREFIX, "HF_"))
    } | {
        "HF_HUB_OFFLINE": "1",
        "HF_ENDPOINT": filled_hub.url,
        PREFIX + "HUB": REPO,
        PREFIX + "CACHE_DIR": str(reader_settings.cache_dir),
    }
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == ["eager", "absent", "offline mode is on (HF_HUB_OFFLINE)"]
    assert len(filled_hub.requests) == requests_before


@pytest.mark.parametrize("how", ["library", "setting"])
def test_offline_asks_nothing_and_says_so(
    how: str, filled_hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled_hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", how == "library")
    reader_settings = settings(tmp_path / "two", offline=how == "setting")
    assert "offline" in find_miss(source(reader_settings))
    assert filled_hub.requests == []


def test_a_revision_is_pinned_once_and_stays(hub: HubServer, tmp_path: Path) -> None:
    first = push_entries(tmp_path / "one", ENTRY)
    reader_settings = settings(tmp_path / "two")
    find_hit(source(reader_settings))
    (pin,) = (reader_settings.cache_dir / "hub").rglob("pins/main.json")
    assert json.loads(pin.read_text())["commit"] == first.commit
    newer = dataclasses.replace(ENTRY, package="newer", created="2025-06-01T00:00:00+00:00")
    second = push_entries(tmp_path / "three", newer)
    assert find_hit(reopen(reader_settings)).entry.package == ENTRY.package
    assert (
        len(hub.list_requests(f"{REPO}/revision/main")) == 3
    )  # by the two pushes and the first look-up
    there = reopen(reader_settings)
    mirror = there.hub.open_latest()
    assert not isinstance(mirror, HubFailure)
    assert mirror.repo.revision == second.commit
    there.hub.record_pin(mirror)
    assert find_hit(reopen(reader_settings)).entry.package == "newer"


def test_a_commit_as_revision_is_what_is_read(hub: HubServer, tmp_path: Path) -> None:
    first = push_entries(tmp_path / "one", ENTRY)
    push_entries(
        tmp_path / "one",
        dataclasses.replace(ENTRY, package="newer", created="2025-06-01T00:00:00+00:00"),
    )
    hub.requests.clear()
    there = source(settings(tmp_path / "two", hub=f"{REPO}@{first.commit}"))
    assert find_hit(there).entry.package == ENTRY.package
    assert hub.list_requests("/api/") == []


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"repo":"team/kernels","revision":"main","commit":"../../x"}']
)
def test_a_damaged_pin_is_asked_for_again(
    damage: bytes, filled_hub: HubServer, tmp_path: Path
) -> None:
    reader_settings = settings(tmp_path / "two")
    find_hit(source(reader_settings))
    (pin,) = (reader_settings.cache_dir / "hub").rglob("pins/main.json")
    pin.write_bytes(damage)
    find_hit(reopen(reader_settings))
    assert len(json.loads(pin.read_text())["commit"]) == 40


def test_the_entry_of_this_very_machine_is_preferred(hub: HubServer, tmp_path: Path) -> None:
    push_entries(tmp_path / "one", dataclasses.replace(ENTRY, target=OTHER, package="other"))
    there = source(settings(tmp_path / "two"))
    assert find_hit(there).entry.package == "other"
    push_entries(tmp_path / "three", ENTRY)
    assert find_hit(source(settings(tmp_path / "four"))).entry.package == ENTRY.package
    assert find_hit(source(settings(tmp_path / "five")), OTHER).entry.package == "other"


def test_a_signed_entry_is_vouched_for_offline_too(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signer = make_signer(tmp_path)
    cache = LocalCache(tmp_path / "one")
    cache.put(ENTRY)
    cache.put_decision_record(NAME, {"regions": [REGION.key]}, HERE, CONTRACT)
    assert len(cache.sign(signer).files) == 2
    push_entries(cache.root)
    allow(tmp_path / "publishers.toml", team=signer.public)
    reader_settings = settings(
        tmp_path / "two", trust="signed", publishers=tmp_path / "publishers.toml"
    )
    hit = find_hit(source(reader_settings))
    assert (hit.vouched_by, hit.stale) == ("publisher 'team'", None)
    assert source(reader_settings).find_decision_record(NAME, HERE, CONTRACT) == {
        "regions": [REGION.key]
    }
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_hit(reopen(reader_settings)).vouched_by == "publisher 'team'"
    assert "which is not on the list of publishers" in find_miss(
        reopen(reader_settings.but(publishers=None))
    )


def test_another_family_or_contract_is_absent(filled_hub: HubServer, tmp_path: Path) -> None:
    there = source(settings(tmp_path / "two"))
    assert find_miss(there, dataclasses.replace(HERE, device="cuda", arch="sm_90")) == "absent"
    assert find_miss(there, contract=Contract("strict")) == "absent"


def test_a_damaged_file_on_the_disk_is_fetched_again(filled_hub: HubServer, tmp_path: Path) -> None:
    reader_settings = settings(tmp_path / "two")
    where = Path(find_hit(source(reader_settings)).where)
    where.write_bytes(b"garbage")
    for index in (reader_settings.cache_dir / "hub").rglob("*.json"):
        index.write_bytes(index.read_bytes()[:-1])
    assert find_hit(reopen(reader_settings)).entry.choice == ENTRY.choice


def test_a_new_commit_costs_only_what_changed(hub: HubServer, tmp_path: Path) -> None:
    push_entries(tmp_path / "one", ENTRY)
    reader_settings = settings(tmp_path / "two")
    there = source(reader_settings)
    find_hit(there)
    push_entries(tmp_path / "three", make_entry())
    mirror = there.hub.open_latest()
    assert not isinstance(mirror, HubFailure)
    there.hub.record_pin(mirror)
    hub.requests.clear()
    assert mirror.repo.revision in find_hit(there).where
    assert hub.list_requests(".safetensors") == []


def test_what_is_on_the_disk_is_part_of_the_cache(filled_hub: HubServer, tmp_path: Path) -> None:
    reader_settings = settings(tmp_path / "two")
    assert list_mirrored_roots(reader_settings) == ()
    where = Path(find_hit(source(reader_settings)).where)
    (root,) = list_mirrored_roots(reader_settings)
    assert where.is_relative_to(root)
    assert list_mirrored_roots(reader_settings.but(hub="")) == ()


# What is refused
# ---------------------------------------------------------------------------------------------------------------


def flip_last_bit(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def listing(change: Callable[[dict], None], part: str) -> Callable[[dict[str, bytes]], None]:
    """A commit in which the one index file that `part` names says something else, and those above
    it agree with that.
    """

    def apply(files: dict[str, bytes]) -> None:
        (path,) = [path for path in files if part in path and path.endswith(".json")]
        body = json.loads(files[path])
        change(body)
        agree(files, path, json.dumps(body).encode())

    return apply


def agree(files: dict[str, bytes], path: str, content: bytes) -> None:
    """Put `data` at `path`, and its digest into every index above."""
    row = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "created": ""}
    files[path] = content
    parts = path.split("/")
    if path == ROOT_INDEX:
        return
    above = (
        ROOT_INDEX
        if parts[2:] == ["index.json"]
        else target_index_file(parts[1])
        if parts[2] == "index"
        else shard_of(files)
    )
    body = json.loads(files[above])
    if above == ROOT_INDEX:
        body["targets"][parts[1]]["index"] = row
    elif parts[2] == "index":
        body["contracts"][parts[3]][""] = row
    else:
        body["entries"][parts[-1].removesuffix(".safetensors")] = row
    agree(files, above, json.dumps(body).encode())


def shard_of(files: dict[str, bytes]) -> str:
    (path,) = [path for path in files if path.endswith("all.json")]
    return path


def own_file(files: dict[str, bytes]) -> str:
    (path,) = [path for path in files if path.endswith(f"{REGION.key}.safetensors")]
    return path


def with_entry(entry: Entry) -> Callable[[dict[str, bytes]], None]:
    """A commit that lists `entry` as the one of our region, with a right digest."""
    return lambda files: agree(files, own_file(files), encode_entry(entry))


FORGED = {
    "digest of an entry": (
        lambda files: files.update({own_file(files): flip_last_bit(files[own_file(files)])}),
        "the index says",
    ),
    "digest of a shard": (
        lambda files: files.update({shard_of(files): flip_last_bit(files[shard_of(files)])}),
        "the index says",
    ),
    "size of an entry": (
        lambda files: files.update({own_file(files): files[own_file(files)] + b"more"}),
        "bytes came, expected",
    ),
    "a file that is not there": (
        lambda files: files.pop(own_file(files)) and None,
        "which the index names",
    ),
    "no safetensors": (lambda files: agree(files, own_file(files), b"MZ garbage"), "unreadable"),
    "another target": (
        with_entry(dataclasses.replace(ENTRY, target=OTHER)),
        "it claims the target 'Another CPU'",
    ),
    "another family": (
        with_entry(
            dataclasses.replace(
                ENTRY, target=dataclasses.replace(HERE, device="cuda", arch="sm_90")
            )
        ),
        "cuda-sm_90",
    ),
    "another region": (
        with_entry(dataclasses.replace(ENTRY, region_key="ef" * 32)),
        "it holds the entry of efef",
    ),
    "another contract": (
        with_entry(dataclasses.replace(ENTRY, contract=Contract("strict"))),
        "under contract",
    ),
    "index that is no JSON": (
        lambda files: files.update({ROOT_INDEX: b"{"}),
        "not an index of this package",
    ),
    "index of other people": (
        lambda files: files.update({ROOT_INDEX: b'{"weight_map": {}}'}),
        "not an index of this package",
    ),
    "index of a later format": (
        lambda files: files.update(
            {ROOT_INDEX: files[ROOT_INDEX].replace(b'"format":1', b'"format":2')}
        ),
        "index format 2",
    ),
    "index too deep": (
        lambda files: files.update({ROOT_INDEX: b"[" * 100_000}),
        "not an index of this package",
    ),
    "a path for a key": (
        listing(
            lambda body: body["entries"].update(
                {"../../../x": next(iter(body["entries"].values()))}
            ),
            "all.json",
        ),
        "'../../../x'",
    ),
    "a path for a prefix": (
        listing(
            lambda body: body["contracts"].update(
                {CONTRACT.digest: {"../..": {"sha256": "0" * 64, "size": 1, "created": ""}}}
            ),
            "/index.json",
        ),
        "'../..', expected a prefix",
    ),
    "a path for a contract": (
        listing(lambda body: body["contracts"].update({"../../../../x": {}}), "/index.json"),
        "'../../../../x', expected a contract",
    ),
    "a negative size": (
        listing(lambda body: body["entries"][REGION.key].update(size=-1), "all.json"),
        "size -1",
    ),
    "a size beyond all limits": (
        listing(lambda body: body["entries"][REGION.key].update(size=1 << 50), "all.json"),
        "size 1125899906842624",
    ),
    "a path for a digest": (
        listing(lambda body: body["entries"][REGION.key].update(sha256="../x"), "all.json"),
        "'../x', expected a sha256",
    ),
}


@pytest.mark.parametrize("case", FORGED)
def test_what_breaks_a_rule_is_refused_by_name_and_nothing_is_kept(
    case: str, filled_hub: HubServer, tmp_path: Path
) -> None:
    forge, rule = FORGED[case]
    replace_files(filled_hub, forge)
    reader_settings = settings(tmp_path / "two")
    there = source(reader_settings)
    reason = find_miss(there)
    assert rule in reason
    assert f"{REPO}@{filled_hub.repositories[REPO].head.oid[:12]}: " in reason
    assert ".json" in reason or ".safetensors" in reason  # the file, by name
    assert list(reader_settings.cache_dir.rglob("*.safetensors")) == []
    outside = [
        path for path in tmp_path.rglob("*") if not path.is_relative_to(reader_settings.cache_dir)
    ]
    assert outside in ([], [tmp_path / "two"])
    requests_before = len(filled_hub.requests)
    find_miss(there)
    assert (
        len(filled_hub.requests) == requests_before
    )  # a commit does not change: a refused file is not fetched for every region


def test_a_target_under_another_name_is_refused(filled_hub: HubServer, tmp_path: Path) -> None:
    push_entries(tmp_path / "one", dataclasses.replace(ENTRY, target=OTHER))

    def claim(files: dict[str, bytes]) -> None:
        body = json.loads(files[ROOT_INDEX])
        body["targets"][target_id(OTHER)]["target"] = dataclasses.asdict(HERE)
        files[ROOT_INDEX] = json.dumps(body).encode()

    replace_files(filled_hub, claim)
    assert "is named after another target" in find_miss(source(settings(tmp_path / "two")))


# A Hub that fails
# ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["/api/models", "/resolve/", "/storage/"])
@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_error_that_passes_is_asked_over(
    part: str, status: int, filled_hub: HubServer, tmp_path: Path
) -> None:
    filled_hub.faults.status[part] = (status, 1)
    filled_hub.faults.headers = {"Retry-After": "0"}
    find_hit(source(settings(tmp_path / "two")))


def test_a_connection_that_ends_halfway_is_asked_over(
    filled_hub: HubServer, tmp_path: Path
) -> None:
    times = iter([True])
    filled_hub.faults.body[".safetensors"] = lambda content: (
        content[:-3] if next(times, False) else content
    )
    find_hit(source(settings(tmp_path / "two")))


def test_a_file_that_stays_too_short_is_said_with_both_sizes(
    filled_hub: HubServer, tmp_path: Path
) -> None:
    filled_hub.faults.body[".safetensors"] = lambda content: content[:-3]
    size = len(encode_entry(ENTRY))
    assert f".safetensors: {size - 3} bytes came, the index says {size}" in find_miss(
        source(settings(tmp_path))
    )


@pytest.mark.parametrize(
    "text",
    [
        "kernels",
        "../b",
        "a/..",
        "a--b/c",
        "a/b@../../x",
        "a/b@",
        "a/b/c",
        "a/b\n",
        "https://host/a/b",
    ],
)
def test_a_name_that_would_be_no_folder_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="owner/name"):
        Settings(hub=text)
    with pytest.raises(SettingError, match="owner/name"):
        Repo.parse(text)


FAILING = {
    "errors": lambda faults: faults.status.update({"/resolve/": (500, -1)}),
    "no right": lambda faults: faults.status.update({"/resolve/": (403, -1)}),
    "half an index": lambda faults: faults.half.add(ROOT_INDEX),
    "half an entry": lambda faults: faults.half.add(".safetensors"),
    "no answer to the first question": lambda faults: faults.hang.add("/api/models"),
    "no answer to a file": lambda faults: faults.hang.add("/storage/"),
    "a byte now and then": lambda faults: faults.drip.add(".safetensors"),
    "a byte now and then of the index": lambda faults: faults.drip.add(ROOT_INDEX),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_hub_that_fails_costs_one_waiting_time(
    case: str, filled_hub: HubServer, tmp_path: Path
) -> None:
    FAILING[case](filled_hub.faults)
    there = source(settings(tmp_path / "two", hub_timeout_s=1.0))
    reason = find_miss(there)  # whoever waited to the end would hang, or find the entry
    assert REPO in reason
    assert "not asked again yet" in find_miss(there)


def test_a_slow_hub_costs_a_start_a_bounded_time(filled_hub: HubServer, tmp_path: Path) -> None:
    reader_settings = settings(tmp_path, hub_timeout_s=20.0)
    there = source(reader_settings)
    there.hub.breaker.record_answer("an answer that came", 60.0)
    find_hit(there)  # a little is left
    there = reopen(reader_settings.but(cache_dir=tmp_path / "another"))
    there.hub.breaker.record_answer("an answer that came", 120.0)
    filled_hub.requests.clear()
    assert "has waited 120 s for the Hub; `cudal1 pull`" in find_miss(there)
    assert filled_hub.requests == []
    there = reopen(reader_settings)
    there.hub.breaker.record_answer("an answer that came", 120.0)
    find_hit(there)  # what is on the disk needs no question


def test_an_answer_for_another_commit_is_refused(filled_hub: HubServer, tmp_path: Path) -> None:
    filled_hub.faults.headers = {"X-Repo-Commit": "f" * 40}
    assert f"the Hub answered for the commit {'f' * 40}" in find_miss(source(settings(tmp_path)))


def test_a_packed_answer_is_not_unpacked(filled_hub: HubServer, tmp_path: Path) -> None:
    filled_hub.faults.headers = {"Content-Encoding": "gzip"}
    filled_hub.faults.body[ROOT_INDEX] = lambda content: gzip.compress(content + b" " * (64 << 20))
    assert f"{ROOT_INDEX}: it came packed as 'gzip'" in find_miss(source(settings(tmp_path)))


@pytest.mark.parametrize("part", [ROOT_INDEX, ".safetensors"])
def test_a_file_without_end_is_cut_off_and_refused(
    part: str, filled_hub: HubServer, tmp_path: Path
) -> None:
    filled_hub.faults.endless.add(part)
    reason = find_miss(source(settings(tmp_path / "two")))
    assert part in reason
    assert "bytes came, expected" in reason


def test_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "ConnectError" in find_miss(source(settings(tmp_path)))


@pytest.mark.parametrize(
    ("repo", "reason"), [("team/none", "no such repository"), (f"{REPO}@none", "no such revision")]
)
def test_what_does_not_exist_is_said(
    repo: str, reason: str, filled_hub: HubServer, tmp_path: Path
) -> None:
    assert reason in find_miss(source(settings(tmp_path, hub=repo)))


def test_a_repository_without_entries_has_none(hub: HubServer, tmp_path: Path) -> None:
    there = source(settings(tmp_path))
    assert find_miss(there) == "absent"
    requests_before = len(hub.requests)
    assert find_miss(there) == "absent"
    assert len(hub.requests) == requests_before


def test_a_folder_that_cannot_be_written_costs_the_entry_only(
    filled_hub: HubServer, tmp_path: Path
) -> None:
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "cache").write_text("a file where the cache belongs")
    reason = find_miss(source(settings(tmp_path / "two")))
    assert "came whole, but" in reason
    assert "NotADirectoryError" in reason or "FileExistsError" in reason


def test_tokens_are_the_librarys_and_stay_on_the_hub(
    filled_hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled_hub.token, filled_hub.repositories[REPO].private = "hf_secret", True
    assert "no right to read it" in find_miss(source(settings(tmp_path / "two")))
    with serving() as cdn:
        cdn.storage, filled_hub.cdn = filled_hub.storage, cdn.url.replace("127.0.0.1", "localhost")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        find_hit(source(settings(tmp_path / "three")))
        assert [headers.get("authorization") for _, _, headers in cdn.requests] == [None]
    assert {
        headers.get("authorization")
        for _, path, headers in filled_hub.requests
        if "/resolve/" in path
    } >= {"Bearer hf_secret"}


def test_what_was_refused_is_in_the_report(filled_hub: HubServer, tmp_path: Path) -> None:
    replace_files(filled_hub, FORGED["another target"][0])
    telemetry.reset()
    find_miss(source(settings(tmp_path / "two")))
    (event,) = [event for event in telemetry.report().events if event.what == "refused"]
    assert event.facts["file"] == repository_file("entry", REGION.key, HERE, CONTRACT.digest)
