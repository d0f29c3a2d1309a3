"""Every kind of bad supply is refused with a message that names the file and the rule, and nothing
of it is loaded or kept.

One row a kind. The attacks in all their forms are in `test_bundle`, `test_imported`, `test_trust`,
`test_hub` and `test_faults`; what has no message because nothing happens (a skewed clock, the lock
of a dead process) is in `test_faults`.
"""

from __future__ import annotations

import errno
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.signing import allow, make_signer, write_revocations
from tests.store.bundles import ENTRY, ENTRY_NAME, GPU, KEY, craft_bundle, name_entry, of, sha
from tests.store.conftest import CONTRACT, HERE, make_entry
from torch_cudal1.core.errors import SupplyError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.store.bundle.imported import import_bundle, list_imported_roots
from torch_cudal1.store.cache.cache_paths import entry_path
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.trust.trust_policy import Rules

Told = tuple[str, Path]  # the message, and the file that it must name


def import_file(path: Path) -> Told:
    with pytest.raises(SupplyError) as refused:
        import_bundle(path, path.parent / "cache")
    assert list_imported_roots(path.parent / "cache") == ()
    return str(refused.value), path


def another_digest(root: Path) -> Told:
    return import_file(
        craft_bundle(root / "x.bundle", [(ENTRY_NAME, len(ENTRY), sha(b"other"))], ENTRY)
    )


def a_path_upwards(root: Path) -> Told:
    return import_file(craft_bundle(root / "x.bundle", *of(("0/../../../etc/cron.d/x", ENTRY))))


def a_bomb(root: Path) -> Told:
    path = craft_bundle(
        root / "x.bundle",
        [(name_entry(key=f"{n:02x}" * 32), 4 << 30, sha(b"")) for n in range(17)],
        b"",
    )
    os.truncate(path, path.stat().st_size + 17 * (4 << 30))
    return import_file(path)


def a_zip_archive(root: Path) -> Told:
    with zipfile.ZipFile(root / "x.bundle", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(1 << 24))
    return import_file(root / "x.bundle")


def an_entry_of_another_target(root: Path) -> Told:
    return import_file(craft_bundle(root / "x.bundle", *of((name_entry(GPU), ENTRY))))


def look_up(root: Path, rules: Rules) -> Told:
    shared = LocalCache(root / "shared")
    hit = LocalCache(root / "own", (shared.root,), rules=rules).get(KEY, HERE, CONTRACT)
    assert isinstance(hit, Refusal)
    return hit.reason, entry_path(shared.root, KEY, HERE, CONTRACT)


def a_revoked_entry(root: Path) -> Told:
    shared, signer = LocalCache(root / "shared"), make_signer(root)
    shared.put(make_entry())
    (signed,) = shared.sign(signer).files
    publishers = allow(root / "publishers.toml", team=signer.public)
    (file,) = shared.iter_entries()
    rules = Rules("signed", publishers, write_revocations(root / "revoked.toml", entry=file.digest))
    assert signed.is_file()
    return look_up(root, rules)


def an_unsigned_entry(root: Path) -> Told:
    LocalCache(root / "shared").put(make_entry())
    return look_up(
        root, Rules("signed", allow(root / "publishers.toml", team=make_signer(root).public))
    )


def store_call(root: Path, call: str, number: int) -> Told:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, call, fail)
        answer = LocalCache(root / "own").put(make_entry())
    assert isinstance(answer, Refusal)
    assert isinstance(LocalCache(root / "own").get(KEY, HERE, CONTRACT), Refusal)
    return answer.reason, entry_path(root / "own", KEY, HERE, CONTRACT)


def a_full_disk(root: Path) -> Told:
    return store_call(root, "fsync", errno.ENOSPC)


def a_rename_that_fails(root: Path) -> Told:
    return store_call(root, "replace", errno.EIO)


KINDS: dict[Callable[[Path], Told], str] = {
    another_digest: "rule 'digest'",
    a_path_upwards: "rule 'names'",
    a_bomb: "rule 'size'",
    a_zip_archive: "rule 'form'",
    an_entry_of_another_target: "rule 'content'",
    a_revoked_entry: "revoked",
    an_unsigned_entry: "sign",
    a_full_disk: "No space left on device",
    a_rename_that_fails: "Input/output error",
}


@pytest.mark.parametrize(
    ("kind", "rule"), KINDS.items(), ids=lambda value: getattr(value, "__name__", None)
)
def test_the_message_names_the_file_and_the_rule(
    kind: Callable[[Path], Told], rule: str, tmp_path: Path
) -> None:
    message, path = kind(tmp_path)
    assert str(path) in message
    assert rule in message
