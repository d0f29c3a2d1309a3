"""`purge --unused`: what nothing leads to goes, what is in use or not understood stays, and nothing outside is touched."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from pathlib import Path

import pytest

from tests.signing import make_signer
from tests.source.bundles import KEY, bundle_of, filled
from tests.source.conftest import HERE, make_entry
from torch_cudal1.__main__ import main
from torch_cudal1.source.cache import LocalCache
from torch_cudal1.source.imported import import_bundle, imported_bundles
from torch_cudal1.source.unused import unused

COMMITS = {name: name * 40 for name in "abc"}


def imported(tmp_path: Path, cache: LocalCache, name: str) -> Path:
    return import_bundle(bundle_of(cache, tmp_path / f"{name}.bundle"), tmp_path / "cache").root


def named(cache_dir: Path, hub: str = "") -> set[Path]:
    return {one.path for one in unused(cache_dir, hub)}


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """A repository's folder with three commits, of which one is pinned."""
    repository = tmp_path / "cache" / "hub" / "huggingface.co" / "team--kernels"
    for commit in COMMITS.values():
        LocalCache(repository / commit / "targets" / "x").put(make_entry())
    pin(repository, "main", COMMITS["a"])
    return repository


def pin(repository: Path, revision: str, commit: str) -> Path:
    path = repository / "pins" / f"{revision}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"repo": "team/kernels", "revision": revision, "commit": commit}))
    return path


def test_an_import_that_a_later_one_contains_goes(tmp_path: Path) -> None:
    cache = filled(tmp_path / "made")
    old = imported(tmp_path, cache, "old")
    assert named(tmp_path / "cache") == set()
    cache.put(make_entry(region_key="12" * 32))
    new = imported(tmp_path, cache, "new")
    assert named(tmp_path / "cache") == {old}
    assert imported_bundles(tmp_path / "cache") == (new, old)


def test_an_import_with_one_file_more_stays(tmp_path: Path) -> None:
    imported(tmp_path, filled(tmp_path / "made"), "old")
    fewer = LocalCache(tmp_path / "fewer")
    fewer.put(make_entry())
    imported(tmp_path, fewer, "new")
    assert named(tmp_path / "cache") == set()


@pytest.mark.parametrize("change", ["torch", "sku"])
def test_an_import_for_another_torch_or_device_replaces_nothing(tmp_path: Path, change: str) -> None:
    for name in ("old", "new"):
        cache = LocalCache(tmp_path / name)
        cache.put(make_entry(target=dataclasses.replace(HERE, **{change: name})))
        imported(tmp_path, cache, name)
    assert named(tmp_path / "cache") == set()


def test_an_unsigned_import_does_not_replace_a_signed_one(tmp_path: Path) -> None:
    signed, unsigned = LocalCache(tmp_path / "signed"), LocalCache(tmp_path / "unsigned")
    signed.put(make_entry())
    unsigned.put(make_entry(region_name="judged again"))
    assert not signed.sign(make_signer(tmp_path)).failed
    first = imported(tmp_path, signed, "signed")
    second = imported(tmp_path, unsigned, "unsigned")
    assert named(tmp_path / "cache") == set()
    import_bundle(tmp_path / "signed.bundle", tmp_path / "cache")  # the latest again
    assert named(tmp_path / "cache") == {second}
    assert first.is_dir()


def test_commits_without_a_pin_go_and_the_pinned_one_stays(mirror: Path, tmp_path: Path) -> None:
    assert named(tmp_path / "cache") == {mirror / COMMITS["b"], mirror / COMMITS["c"]}
    pin(mirror, "v2", COMMITS["b"])
    assert named(tmp_path / "cache") == {mirror / COMMITS["c"]}
    assert named(tmp_path / "cache", hub=f"team/kernels@{COMMITS['c']}") == set()


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"commit"'])
def test_where_a_pin_cannot_be_read_no_commit_goes(mirror: Path, tmp_path: Path, damage: str) -> None:
    (mirror / "pins" / "main.json").write_text(damage)
    assert named(tmp_path / "cache") == set()


def test_the_command_says_what_would_go_and_does_it_with_yes(
    mirror: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["purge", "--unused", "--cache-dir", str(tmp_path / "cache"), "--json"]
    for dry in ([], ["--dry-run"]):
        assert main([*command, *dry]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (len(told["would_delete"]), told["deleted"], told["freed_bytes"]) == (2, [], 0)
        assert (mirror / COMMITS["b"]).is_dir()
    size = sum(path.stat().st_size for name in "bc" for path in (mirror / COMMITS[name]).rglob("*") if path.is_file())
    assert main([*command, "--yes"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (len(told["deleted"]), told["freed_bytes"]) == (2, size)
    assert sorted(path.name for path in mirror.iterdir() if len(path.name) == 40) == [COMMITS["a"]]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["would_delete"] == []


def test_what_a_pull_is_just_filling_stays(mirror: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(mirror / "pull.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["purge", "--unused", "--yes", "--cache-dir", str(tmp_path / "cache")]) == 1
    assert "somebody is at work there" in capsys.readouterr().err
    assert (mirror / COMMITS["b"]).is_dir()


def test_links_are_neither_followed_nor_deleted(mirror: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (mirror / ("d" * 40)).symlink_to(tmp_path / "precious")
    (mirror / COMMITS["b"] / "inside").symlink_to(tmp_path / "precious")
    assert main(["purge", "--unused", "--yes", "--cache-dir", str(tmp_path / "cache")]) == 0
    assert not (mirror / COMMITS["b"]).exists()
    assert (tmp_path / "precious" / "file").exists()
    assert (mirror / ("d" * 40)).is_symlink()


def test_what_killed_processes_left_goes_too(mirror: Path, tmp_path: Path) -> None:
    imported(tmp_path, filled(tmp_path / "made"), "one")
    left = [tmp_path / "cache" / "imported" / name for name in (".incoming-" + "0" * 64, ".old-x", ".purged-y")]
    for folder in (*left, mirror / ".purged-z"):
        folder.mkdir()
    assert named(tmp_path / "cache") >= {*left, mirror / ".purged-z"}
    assert main(["purge", "--unused", "--yes", "--cache-dir", str(tmp_path / "cache")]) == 0
    assert named(tmp_path / "cache") == set()
    assert len(imported_bundles(tmp_path / "cache")) == 1


def test_a_folder_that_cannot_be_deleted_is_told(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, to: Path) -> None:
        raise PermissionError(13, "read-only", str(path))

    monkeypatch.setattr(os, "replace", refuse)
    assert main(["purge", "--unused", "--yes", "--cache-dir", str(tmp_path / "cache")]) == 1
    assert "stays: PermissionError" in capsys.readouterr().err


def test_nothing_beside_it_may_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["purge", "--unused", KEY, "--cache-dir", str(tmp_path)]) == 2
    assert "nothing beside it" in capsys.readouterr().err
