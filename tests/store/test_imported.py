"""An import is there whole or not at all, whatever the disk or a kill does; it lies apart from what
was judged here.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.store.bundles import KEY, NAME, bundle_of, fill_cache
from tests.store.conftest import CONTRACT, HERE, make_entry
from torch_cudal1.core.errors import SupplyError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.store.bundle import imported as imported_module
from torch_cudal1.store.bundle.imported import ImportReport, import_bundle, list_imported_roots
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.cache.resolve import Hit
from torch_cudal1.store.context import cache_for

FORK = multiprocessing.get_context(
    "fork"
)  # the children only write files; starting a fresh torch would cost seconds each
FILES = 4


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return bundle_of(fill_cache(tmp_path / "made"), tmp_path / "x.bundle")


def present(folder: Path) -> int:
    """How many whole entries a look-up can reach among the imported ones; a broken one fails."""
    entries_by_root = [
        list(LocalCache(root).iter_entries()) for root in list_imported_roots(folder)
    ]
    assert all(hasattr(file, "entry") for entries in entries_by_root for file in entries)
    return sum(map(len, entries_by_root))


def in_child(work: Callable[[], Any]) -> int | None:
    """Run `work` in a forked child; its exit code, negative for a signal."""
    child = FORK.Process(target=work)
    child.start()
    child.join(60)
    return child.exitcode


def killing(name: str, at: int, *, after: bool) -> Callable[[pytest.MonkeyPatch], None]:
    """Patch a function that the import calls, so that its `at`-th call kills the process before or
    after it did its work.
    """

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        where: Any = os if name == "replace" else imported_module
        original, calls = getattr(where, name), [0]

        def deadly(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == at and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args, **kwargs)
            if calls[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        monkeypatch.setattr(where, name, deadly)

    return patch


def test_an_import_is_found_beside_the_own_entries_and_never_among_them(
    tmp_path: Path, bundle: Path
) -> None:
    imported_bundle = import_bundle(bundle, tmp_path / "cache")
    assert (
        imported_bundle.entries,
        imported_bundle.records,
        imported_bundle.families,
        imported_bundle.already,
    ) == (
        3,
        1,
        ("cpu-x86_64", "cuda-sm_90"),
        False,
    )
    assert imported_bundle.root == tmp_path / "cache" / "imported" / imported_bundle.digest
    assert present(tmp_path / "cache") == 3
    assert list(LocalCache(tmp_path / "cache").iter_entries()) == []
    cache = cache_for(Settings(cache_dir=tmp_path / "cache"))
    hit = cache.get(KEY, HERE, CONTRACT)
    assert isinstance(hit, Hit)
    assert hit.stale is not None, "nobody vouches for it, so it is to be judged first"
    assert "nobody signed it" in hit.stale


def test_an_unsigned_import_is_refused_under_the_strict_policy(
    tmp_path: Path, bundle: Path
) -> None:
    import_bundle(bundle, tmp_path / "cache")
    cache = cache_for(Settings(cache_dir=tmp_path / "cache", trust="signed"))
    assert isinstance(cache.get(KEY, HERE, CONTRACT), Refusal)
    assert isinstance(cache.get_decision_record(NAME, HERE, CONTRACT), Refusal)


def test_a_second_import_changes_nothing(tmp_path: Path, bundle: Path) -> None:
    first = import_bundle(bundle, tmp_path / "cache")
    before = {path: path.stat().st_mtime_ns for path in first.root.rglob("*.*")}
    second = import_bundle(bundle, tmp_path / "cache")
    assert second == ImportReport(**{**vars(first), "already": True})
    assert {path: path.stat().st_mtime_ns for path in first.root.rglob("*.*")} == before


def test_a_second_import_into_a_read_only_image_is_no_error(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_bundle(bundle, tmp_path / "cache")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(imported_module, "write_file", refuse)
    assert import_bundle(bundle, tmp_path / "cache").already


def test_a_damaged_import_is_made_whole_again(tmp_path: Path, bundle: Path) -> None:
    root = import_bundle(bundle, tmp_path / "cache").root
    first, second, *_ = sorted(root.rglob("*.safetensors"))
    first.write_bytes(b"damage")
    second.unlink()
    assert import_bundle(bundle, tmp_path / "cache").already is False
    assert present(tmp_path / "cache") == 3
    assert [
        path.name
        for path in (tmp_path / "cache" / "imported").iterdir()
        if path.name.startswith(".")
    ] == []


def test_the_latest_import_is_asked_first(tmp_path: Path, bundle: Path) -> None:
    LocalCache(tmp_path / "other").put(make_entry(package="other"))
    other = bundle_of(LocalCache(tmp_path / "other"), tmp_path / "other.bundle")
    folder = tmp_path / "cache"
    for last in (bundle, other, bundle, bundle, other):
        expected = import_bundle(last, folder).root
        assert list_imported_roots(folder)[0].parent == expected


def test_a_clock_that_was_ahead_does_not_keep_an_old_import_first(
    tmp_path: Path, bundle: Path
) -> None:
    LocalCache(tmp_path / "other").put(make_entry(package="other"))
    other = bundle_of(LocalCache(tmp_path / "other"), tmp_path / "other.bundle")
    ahead = time.time_ns() + 10**9 * 86_400 * 365
    os.utime(import_bundle(bundle, tmp_path / "cache").root, ns=(ahead, ahead))
    expected = import_bundle(other, tmp_path / "cache").root
    assert list_imported_roots(tmp_path / "cache")[0].parent == expected


def test_links_among_the_imports_are_not_followed(tmp_path: Path, bundle: Path) -> None:
    root = import_bundle(bundle, tmp_path / "cache").root
    shutil.move(root, tmp_path / "elsewhere")
    root.symlink_to(tmp_path / "elsewhere")
    assert list_imported_roots(tmp_path / "cache") == ()
    assert import_bundle(bundle, tmp_path / "cache").already is False
    assert not root.is_symlink()
    assert (tmp_path / "elsewhere" / "0").is_dir()


def test_nothing_is_written_through_links_that_lie_in_wait(tmp_path: Path, bundle: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    digest = import_bundle(bundle, tmp_path / "cache").digest
    for folder, waits in (("a", Path()), ("b", Path("0")), ("c", Path("0/v1/cpu-x86_64"))):
        link = tmp_path / folder / "imported" / f".incoming-{digest}" / waits
        link.parent.mkdir(parents=True)
        link.symlink_to(outside)
        import_bundle(bundle, tmp_path / folder)
        assert present(tmp_path / folder) == 3
        assert list(outside.iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, bundle: Path) -> None:
    for number in range(FILES):
        with pytest.MonkeyPatch.context() as patched:
            original, calls = os.fsync, [0]

            def full(
                descriptor: int,
                at: int = number,
                original: Any = original,
                calls: list[int] = calls,
            ) -> None:
                calls[0] += 1
                if calls[0] > at:
                    raise OSError(errno.ENOSPC, "No space left on device")
                original(descriptor)

            patched.setattr(os, "fsync", full)
            with pytest.raises(SupplyError, match=r"No space left on device.*nothing was imported"):
                import_bundle(bundle, tmp_path / "cache")
        assert [path.name for path in (tmp_path / "cache" / "imported").iterdir()] == [
            "import.lock"
        ]
    assert import_bundle(bundle, tmp_path / "cache").already is False


def test_a_rename_that_fails_leaves_nothing(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.replace

    def failing(source: Any, destination: Any) -> None:
        if Path(destination).parent.name == "imported":
            raise OSError(errno.EIO, "Input/output error")
        original(source, destination)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(SupplyError, match=r"Input/output error; nothing was imported"):
        import_bundle(bundle, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "imported").iterdir()] == ["import.lock"]


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    monkeypatch.setattr(imported_module, "write_file", None)
    with pytest.raises(SupplyError, match="has 1 free; nothing was imported"):
        import_bundle(bundle, tmp_path / "cache")


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, bundle: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(SupplyError, match="rule 'disk'"):
        import_bundle(bundle, tmp_path / "cache")


MOMENTS = [("write_file", at, after) for at in range(1, FILES + 1) for after in (False, True)]
MOMENTS += [("replace", at, after) for at in range(1, FILES + 2) for after in (False, True)]


@pytest.mark.parametrize(("name", "at", "after"), MOMENTS)
def test_a_killed_import_shows_nothing_and_the_next_one_goes_on(
    tmp_path: Path, bundle: Path, name: str, at: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    with pytest.MonkeyPatch.context() as patched:
        killing(name, at, after=after)(patched)
        assert in_child(lambda: import_bundle(bundle, folder)) == -signal.SIGKILL
    done_already = name == "replace" and at == FILES + 1 and after
    assert present(folder) == (3 if done_already else 0)
    written: list[Path] = []
    original = imported_module.write_file
    monkeypatch.setattr(
        imported_module,
        "write_file",
        lambda path, content: written.append(path) or original(path, content),
    )
    assert import_bundle(bundle, folder).already is done_already
    assert len(written) == (0 if done_already else FILES - at + (not after))
    assert present(folder) == 3
    leftovers = [
        path.name
        for path in folder.rglob("*")
        if path.suffix in (".tmp", ".lock") or path.name.startswith(".")
    ]
    assert leftovers == ["import.lock"]


def test_what_a_killed_import_left_is_swept_by_the_next_of_another_bundle(
    tmp_path: Path, bundle: Path
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        killing("write_file", 3, after=True)(patched)
        assert in_child(lambda: import_bundle(bundle, tmp_path / "cache")) == -signal.SIGKILL
    LocalCache(tmp_path / "other").put(make_entry(package="other"))
    import_bundle(
        bundle_of(LocalCache(tmp_path / "other"), tmp_path / "other.bundle"), tmp_path / "cache"
    )
    assert [
        path.name
        for path in (tmp_path / "cache" / "imported").iterdir()
        if path.name.startswith(".")
    ] == []


def test_processes_that_import_at_once_do_not_disturb_each_other(
    tmp_path: Path, bundle: Path
) -> None:
    children = [
        FORK.Process(target=import_bundle, args=(bundle, tmp_path / "cache")) for _ in range(6)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 6
    assert present(tmp_path / "cache") == 3


def test_without_locks_an_import_still_is_whole(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import contextmanager

    from torch_cudal1.store.cache.files import LockState

    @contextmanager
    def no_locks(path: Path, timeout_s: float) -> Any:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield LockState(False, "NotImplementedError: no flock here")

    monkeypatch.setattr(imported_module, "hold_lock", no_locks)
    import_bundle(bundle, tmp_path / "cache")
    assert present(tmp_path / "cache") == 3
