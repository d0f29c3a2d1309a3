"""`purge --unused`: what nothing leads to goes, what is in use or not understood stays, and nothing
outside is touched.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.signing import make_signer
from tests.store.bundles import KEY, bundle_of, fill_cache
from tests.store.conftest import HERE, make_entry
from torch_cudal1.__main__ import main
from torch_cudal1.cli.commands.doctor import _cache
from torch_cudal1.cli.view import text
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.store.bundle.imported import import_bundle, list_imported_bundles
from torch_cudal1.store.cache.build_files import (
    BuildCount,
    build_folder,
    build_path,
    count_builds,
    name_versions,
)
from torch_cudal1.store.cache.files import Stored, read_file, write_file
from torch_cudal1.store.cache.gc import find_build_folders, find_unused, remove_folder
from torch_cudal1.store.cache.local_cache import LocalCache

COMMITS = {name: name * 40 for name in "abc"}


def import_to(tmp_path: Path, cache: LocalCache, name: str) -> Path:
    return import_bundle(bundle_of(cache, tmp_path / f"{name}.bundle"), tmp_path / "cache").root


def list_unused(cache_dir: Path, hub: str = "") -> set[Path]:
    return {folder.path for folder in find_unused(cache_dir, hub)}


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
    cache = fill_cache(tmp_path / "made")
    old = import_to(tmp_path, cache, "old")
    assert list_unused(tmp_path / "cache") == set()
    cache.put(make_entry(region_key="12" * 32))
    new = import_to(tmp_path, cache, "new")
    assert list_unused(tmp_path / "cache") == {old}
    assert list_imported_bundles(tmp_path / "cache") == (new, old)


def test_an_import_with_one_file_more_stays(tmp_path: Path) -> None:
    import_to(tmp_path, fill_cache(tmp_path / "made"), "old")
    fewer = LocalCache(tmp_path / "fewer")
    fewer.put(make_entry())
    import_to(tmp_path, fewer, "new")
    assert list_unused(tmp_path / "cache") == set()


@pytest.mark.parametrize("change", ["torch", "sku"])
def test_an_import_for_another_torch_or_device_replaces_nothing(
    tmp_path: Path, change: str
) -> None:
    for name in ("old", "new"):
        cache = LocalCache(tmp_path / name)
        cache.put(make_entry(target=dataclasses.replace(HERE, **{change: name})))
        import_to(tmp_path, cache, name)
    assert list_unused(tmp_path / "cache") == set()


def test_an_unsigned_import_does_not_replace_a_signed_one(tmp_path: Path) -> None:
    signed, unsigned = LocalCache(tmp_path / "signed"), LocalCache(tmp_path / "unsigned")
    signed.put(make_entry())
    unsigned.put(make_entry(region_name="judged again"))
    assert not signed.sign(make_signer(tmp_path)).failed
    first = import_to(tmp_path, signed, "signed")
    second = import_to(tmp_path, unsigned, "unsigned")
    assert list_unused(tmp_path / "cache") == set()
    import_bundle(tmp_path / "signed.bundle", tmp_path / "cache")  # the latest again
    assert list_unused(tmp_path / "cache") == {second}
    assert first.is_dir()


def test_commits_without_a_pin_go_and_the_pinned_one_stays(mirror: Path, tmp_path: Path) -> None:
    assert list_unused(tmp_path / "cache") == {mirror / COMMITS["b"], mirror / COMMITS["c"]}
    pin(mirror, "v2", COMMITS["b"])
    assert list_unused(tmp_path / "cache") == {mirror / COMMITS["c"]}
    assert list_unused(tmp_path / "cache", hub=f"team/kernels@{COMMITS['c']}") == set()


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"commit"'])
def test_where_a_pin_cannot_be_read_no_commit_goes(
    mirror: Path, tmp_path: Path, damage: str
) -> None:
    (mirror / "pins" / "main.json").write_text(damage)
    assert list_unused(tmp_path / "cache") == set()


def test_the_command_says_what_would_go_and_does_it_with_yes(
    mirror: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["purge", "--unused", "--cache-dir", str(tmp_path / "cache"), "--json"]
    for dry in ([], ["--dry-run"]):
        assert main([*command, *dry]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (len(document["would_delete"]), document["deleted"], document["freed_bytes"]) == (
            2,
            [],
            0,
        )
        assert (mirror / COMMITS["b"]).is_dir()
    size = sum(
        path.stat().st_size
        for name in "bc"
        for path in (mirror / COMMITS[name]).rglob("*")
        if path.is_file()
    )
    assert main([*command, "--yes"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (len(document["deleted"]), document["freed_bytes"]) == (2, size)
    assert sorted(path.name for path in mirror.iterdir() if len(path.name) == 40) == [COMMITS["a"]]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["would_delete"] == []


def test_what_a_pull_is_just_filling_stays(
    mirror: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(mirror / "pull.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["purge", "--unused", "--yes", "--cache-dir", str(tmp_path / "cache")]) == 1
    assert "another process may be at work there" in capsys.readouterr().err
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
    import_to(tmp_path, fill_cache(tmp_path / "made"), "one")
    leftovers = [
        tmp_path / "cache" / "imported" / name
        for name in (".incoming-" + "0" * 64, ".old-x", ".purged-y")
    ]
    for folder in (*leftovers, mirror / ".purged-z"):
        folder.mkdir()
    assert list_unused(tmp_path / "cache") >= {*leftovers, mirror / ".purged-z"}
    assert main(["purge", "--unused", "--yes", "--cache-dir", str(tmp_path / "cache")]) == 0
    assert list_unused(tmp_path / "cache") == set()
    assert len(list_imported_bundles(tmp_path / "cache")) == 1


def test_a_folder_that_cannot_be_deleted_is_told(
    mirror: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(path: Path, to: Path) -> None:
        raise PermissionError(13, "read-only", str(path))

    monkeypatch.setattr(os, "replace", refuse)
    assert main(["purge", "--unused", "--yes", "--cache-dir", str(tmp_path / "cache")]) == 1
    assert "stays: PermissionError" in capsys.readouterr().err


def test_nothing_beside_it_may_be_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["purge", "--unused", KEY, "--cache-dir", str(tmp_path)]) == 2
    assert "nothing beside it" in capsys.readouterr().err


# Compiled kernels
# ---------------------------------------------------------------------------------------------------------------

FILES = ("ab/abcd.safetensors", "ab/abce.json")


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """A cache's compiled kernels: of the versions here, of others, and some left by a purge that
    was killed.
    """
    home = build_folder(tmp_path / "cache")
    for name in (name_versions(), "0.1.0-torch2.0-triton2.0-0123", ".purged-0.0.9"):
        for file in FILES:
            (home / name / file).parent.mkdir(parents=True, exist_ok=True)
            (home / name / file).write_bytes(name.encode())
    return home


def list_home(home: Path) -> set[str]:
    return {path.name for path in home.iterdir() if path.is_dir()}


def test_kernels_of_other_versions_go_and_those_that_a_search_here_takes_stay(
    kernels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["purge", "--unused", "--cache-dir", str(tmp_path / "cache"), "--json"]
    assert main(command) == 0
    assert len(json.loads(capsys.readouterr().out)["would_delete"]) == 2
    assert len(list_home(kernels)) == 3
    assert main([*command, "--yes"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["freed_bytes"] == 2 * len("0.1.0-torch2.0-triton2.0-0123") + 2 * len(
        ".purged-0.0.9"
    )
    assert list_home(kernels) == {name_versions()}
    assert main([*command, "--yes"]) == 0
    assert json.loads(capsys.readouterr().out)["deleted"] == []


def test_purge_of_everything_takes_all_kernels_and_one_of_a_key_takes_none(
    kernels: Path, tmp_path: Path
) -> None:
    cache = LocalCache(tmp_path / "cache")
    cache.put(make_entry())
    for some in (["--broken"], [KEY]):
        assert main(["purge", *some, "--yes", "--cache-dir", str(cache.root)]) == 0
        assert len(list_home(kernels)) == 3
    assert main(["purge", "--cache-dir", str(cache.root)]) == 0
    assert len(list_home(kernels)) == 3
    assert main(["purge", "--yes", "--cache-dir", str(cache.root)]) == 0
    assert list_home(kernels) == set()


def test_purge_of_everything_takes_measured_times_and_what_a_killed_one_left_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("timings", ".purged-timings", "timings-of-somebody"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0123.jsonl").write_text("{}")
    assert main(["purge", "--json", "--cache-dir", str(tmp_path)]) == 0
    assert len(json.loads(capsys.readouterr().out)["would_delete"]) == 2
    assert (tmp_path / "timings" / "0123.jsonl").exists()
    assert main(["purge", "--yes", "--cache-dir", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} & {
        "timings",
        ".purged-timings",
    } == set()
    assert (tmp_path / "timings-of-somebody" / "0123.jsonl").exists()


def test_a_purge_of_everything_that_may_not_delete_kernels_says_so(
    kernels: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(path: Path, to: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(os, "replace", refuse)
    assert main(["purge", "--yes", "--cache-dir", str(tmp_path / "cache"), "--json"]) == 1
    shown = capsys.readouterr()
    assert shown.err.count("stays: OSError: [Errno 30]") == 3
    assert json.loads(shown.out)["deleted"] == []
    assert len(list_home(kernels)) == 3


def test_kernels_that_another_purge_is_at_stay(
    kernels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(kernels / ".purge.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["purge", "--unused", "--yes", "--cache-dir", str(tmp_path / "cache")]) == 1
    assert capsys.readouterr().err.count(" stays: another process may be at work there: ") == 2
    assert len(list_home(kernels)) == 3


def test_two_purges_at_once_are_both_right(kernels: Path, tmp_path: Path) -> None:
    folders = list(find_build_folders(tmp_path / "cache"))
    assert [remove_folder(folder) for folder in folders] == [None] * 3
    assert [remove_folder(folder) for folder in folders] == [None] * 3, "the other one was first"


def test_writers_and_readers_go_on_while_their_folder_is_purged(tmp_path: Path) -> None:
    cache, content = tmp_path / "cache", b"machine code" * 500
    paths = [build_path(cache, f"{number:064x}") for number in range(200)]

    def search() -> list[Stored | Refusal | bytes | Refusal]:
        return [
            answer
            for path in paths
            for answer in (write_file(path, content), read_file(path, 1 << 20))
        ]

    with ThreadPoolExecutor() as pool:
        work, purged = pool.submit(search), 0
        while not work.done():
            purged += sum(remove_folder(item) is None for item in find_build_folders(cache))
    answers = work.result()
    assert purged > 1
    assert {type(item) for item in answers[0::2]} <= {Stored, Refusal}, (
        "a purge after each step may refuse a writer, not stop it"
    )
    assert [item for item in answers[1::2] if item not in (content, Refusal("absent"))] == [], (
        "no half file"
    )
    assert [item for item in search() if isinstance(item, Refusal)] == [], (
        "what was purged is kept again"
    )
    assert count_builds(cache) == BuildCount(len(paths), len(paths) * len(content))
    assert list_home(build_folder(cache)) == {name_versions()}


def test_list_and_doctor_say_how_much_the_kernels_take(
    kernels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LocalCache(tmp_path / "cache").put(make_entry())
    assert main(["list", "--json", "--cache-dir", str(tmp_path / "cache")]) == 0
    size = sum(path.stat().st_size for path in kernels.rglob("*") if path.is_file())
    assert json.loads(capsys.readouterr().out)["compiled"] == {"count": 6, "size_bytes": size}
    finding = _cache(tmp_path / "cache").what
    assert "cache: 1 entry, " in finding
    assert f"; 6 compiled kernels kept for later searches, {text.size(size)}" in finding
