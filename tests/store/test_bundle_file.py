"""A bundle is read in one way or refused with the rule that it breaks, and a refusal leaves nothing
behind.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import multiprocessing
import os
import pickle
import signal
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors

from tests.store.bundles import (
    ENTRY,
    ENTRY_NAME,
    GPU,
    KEY,
    NAME,
    OTHER_KEY,
    RECORD,
    RECORD_NAME,
    bundle_of,
    craft_bundle,
    fill_cache,
    frame_file,
    name_entry,
    of,
    sha,
    sign_caches,
)
from tests.store.conftest import CONTRACT, HERE, make_entry
from torch_cudal1.core.errors import SupplyError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.program import canonical_json
from torch_cudal1.store.bundle import bundle_file as bundle_module
from torch_cudal1.store.bundle.bundle_file import METADATA_KEY, open_bundle, write_bundle
from torch_cudal1.store.bundle.imported import import_bundle, list_imported_roots
from torch_cudal1.store.cache.decision_record import encode_record
from torch_cudal1.store.cache.entry_file import encode_entry
from torch_cudal1.store.cache.files import write_atomically
from torch_cudal1.store.cache.inventory import take_inventory
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.cache.resolve import Hit

HOSTILE_NAMES = {
    "upwards": "../../../.bashrc",
    "upwards inside": f"0/v1/../../../{KEY}.safetensors",
    "upwards as a family": ENTRY_NAME.replace("cpu-x86_64", ".."),
    "absolute": "/etc/cron.d/job",
    "absolute after the layer": "0//" + ENTRY_NAME[2:],
    "no layer": ENTRY_NAME[2:],
    "layer too high": "100" + ENTRY_NAME[1:],
    "layer written twice": "00" + ENTRY_NAME[1:],
    "backslashes": ENTRY_NAME.replace("/", "\\"),
    "line break at the end": ENTRY_NAME + "\n",
    "a null byte": ENTRY_NAME.replace("cpu", "c\0u"),
    "letters beyond ASCII": ENTRY_NAME.replace("cpu", "cpü"),
    "a path after the file": ENTRY_NAME + "/../../../x",
    "empty": "",
    "folder of another key": ENTRY_NAME.replace("/ab/", "/cd/"),
    "upper case key": ENTRY_NAME.replace(KEY, KEY.upper()),
    "another suffix": ENTRY_NAME.replace(".safetensors", ".py"),
    "a decision record without its folder": RECORD_NAME.replace("alias/", ""),
    "an entry among decision records": ENTRY_NAME.replace("v1/", "v1/alias/"),
    "another version": ENTRY_NAME.replace("v1", "v2"),
    "the own cache's lock": "0/v1/cpu-x86_64/x.lock",
}


def import_refused(path: Path, folder: Path) -> str:
    """Import must refuse `path` and leave nothing at all; the rule it named."""
    with pytest.raises(SupplyError) as raised:
        import_bundle(path, folder)
    assert str(path) in str(raised.value)
    remains = [file for file in folder.rglob("*") if file.name not in ("imported", "import.lock")]
    assert remains == []
    assert list_imported_roots(folder) == ()
    return raised.value.rule


# Written and read
# ----------------------------------------------------------------------------------------------------------------


def test_equal_content_gives_an_equal_bundle(tmp_path: Path) -> None:
    first = bundle_of(fill_cache(tmp_path / "a"), tmp_path / "a.bundle")
    second = bundle_of(fill_cache(tmp_path / "b"), tmp_path / "b.bundle")
    assert first.read_bytes() == second.read_bytes()


def test_a_bundle_holds_every_family_and_any_safetensors_library_lists_it(tmp_path: Path) -> None:
    cache = fill_cache(tmp_path / "cache")
    path = bundle_of(cache, tmp_path / "x.bundle")
    with open_bundle(path) as opened:
        assert opened.manifest.families == ("cpu-x86_64", "cuda-sm_90")
        contents = {member.relative_path: content for member, content in opened.iter_files()}
    with safetensors.safe_open(path, framework="pt") as listed:
        assert sorted(listed.keys()) == sorted(f"0/{place}" for place in contents)
        assert all(
            bytes(listed.get_tensor(f"0/{place}").tolist()) == content
            for place, content in contents.items()
        )
    assert all((cache.root / place).read_bytes() == content for place, content in contents.items())
    assert len(contents) == 4


def test_models_of_one_architecture_are_kept_apart_in_layers(tmp_path: Path) -> None:
    h100 = LocalCache(tmp_path / "h100")
    h100.put(make_entry(target=dataclasses.replace(GPU, sku="NVIDIA H100"), package="h100"))
    fill_cache(tmp_path / "h200")
    path = bundle_of(LocalCache(tmp_path / "h200", (h100.root,)), tmp_path / "x.bundle")
    import_bundle(path, tmp_path / "new")
    roots = list_imported_roots(tmp_path / "new")
    assert [root.name for root in roots] == ["0", "1"]
    skus = {LocalCache(root).get(KEY, GPU, CONTRACT).entry.target.sku for root in roots}
    assert skus == {"NVIDIA H100", "NVIDIA H200"}


def test_each_model_of_an_architecture_finds_what_was_measured_for_its_own_choices(
    tmp_path: Path,
) -> None:
    caches = [LocalCache(tmp_path / sku) for sku in ("h100", "h200")]
    for cache in caches:
        cache.put(make_entry(target=dataclasses.replace(GPU, sku=cache.root.name)))
        cache.put_decision_record(
            NAME, {"winner": cache.root.name, "candidates": [cache.root.name]}, GPU, CONTRACT
        )
    rules = sign_caches(tmp_path / "team.pem", *caches)
    import_bundle(
        bundle_of(LocalCache(caches[0].root, (caches[1].root,)), tmp_path / "x.bundle"),
        tmp_path / "new",
    )
    cache = LocalCache(tmp_path / "new", list_imported_roots(tmp_path / "new"), rules=rules)
    for sku in ("h100", "h200"):
        here = dataclasses.replace(GPU, sku=sku)
        hit = cache.get(KEY, here, CONTRACT)
        assert isinstance(hit, Hit)
        assert (hit.entry.target, hit.stale) == (here, None)
        assert cache.get_decision_record(NAME, here, CONTRACT, [sku]) == {
            "winner": sku,
            "candidates": [sku],
        }
    assert isinstance(cache.get_decision_record(NAME, GPU, CONTRACT, ["others"]), Refusal)


def test_what_an_earlier_folder_has_hides_the_later_one(tmp_path: Path) -> None:
    fill_cache(tmp_path / "own")
    LocalCache(tmp_path / "shared").put(make_entry(package="shared"))
    path = bundle_of(LocalCache(tmp_path / "own", (tmp_path / "shared",)), tmp_path / "x.bundle")
    with open_bundle(path) as opened:
        assert len(opened.manifest.members) == 4


def test_a_decision_record_goes_only_with_everything_it_leads_to(tmp_path: Path) -> None:
    cache = fill_cache(tmp_path / "cache")
    cache.put_decision_record(
        "12" * 32, {"runs": "eager", "regions": [KEY, OTHER_KEY]}, HERE, CONTRACT
    )
    inventory = take_inventory(cache)
    assert len(inventory.records) == 2
    assert [record.cache_path.name for record in inventory.select([KEY]).records] == [NAME]
    assert len(inventory.select([KEY, OTHER_KEY]).records) == 2
    assert inventory.select(None, ["cuda-sm_90"]).records == ()
    assert len(inventory.select(None, ["cuda-sm_90"]).entries) == 1


def test_export_does_not_overwrite_a_file_that_is_no_bundle(tmp_path: Path) -> None:
    precious = tmp_path / "model.py"
    precious.write_text("weights = 1\n")
    with pytest.raises(SupplyError, match="not a bundle"):
        write_bundle(precious, take_inventory(fill_cache(tmp_path / "cache")))
    assert precious.read_text() == "weights = 1\n"


def test_a_full_disk_keeps_the_old_bundle_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    path = bundle_of(fill_cache(tmp_path / "cache"), tmp_path / "out" / "x.bundle")
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    inventory = take_inventory(fill_cache(tmp_path / "cache")).select([KEY])
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SupplyError, match="No space left"):
        write_bundle(path, inventory)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_what_a_killed_export_left_is_removed_by_the_next_and_a_living_one_is_left_alone(
    tmp_path: Path,
) -> None:
    inventory = take_inventory(fill_cache(tmp_path / "cache"))
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "x.bundle"
    child = multiprocessing.get_context("fork").Process(target=die_while_writing, args=(path,))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert len(list(path.parent.iterdir())) == 1
    with write_atomically(path) as living:
        living.write(b"half of it")
        write_bundle(path, inventory)
        assert len(list(path.parent.iterdir())) == 2
    assert list(path.parent.iterdir()) == [path]
    assert path.read_bytes() == b"half of it", "the last one wins"


def die_while_writing(path: Path) -> None:
    with write_atomically(path) as file:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def test_an_entry_that_changes_during_the_export_is_noticed(tmp_path: Path) -> None:
    cache = fill_cache(tmp_path / "cache")
    inventory = take_inventory(cache)
    cache.put(make_entry(package="later"))
    with pytest.raises(SupplyError, match="changed while it was exported"):
        write_bundle(tmp_path / "x.bundle", inventory)
    assert not (tmp_path / "x.bundle").exists()


# Attacks
# -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE_NAMES.values(), ids=HOSTILE_NAMES)
def test_a_name_that_is_no_place_is_refused(tmp_path: Path, name: str) -> None:
    path = craft_bundle(tmp_path / "x.bundle", *of((name, ENTRY)))
    assert import_refused(path, tmp_path / "cache") == (
        "form" if "\0" in name or not name.isascii() else "names"
    )
    assert {file.name for file in tmp_path.iterdir()} <= {"x.bundle", "cache"}


@pytest.mark.parametrize(
    "size",
    [0, -1, True, 1.0, "9", None, (4 << 30) + 1, 10**30],
    ids=lambda size: f"{type(size).__name__} {size}",
)
def test_a_size_that_cannot_be_is_refused_whatever_the_file_has(tmp_path: Path, size: Any) -> None:
    path = craft_bundle(tmp_path / "x.bundle", [(ENTRY_NAME, size, sha(ENTRY))], b"")
    if type(size) is int and abs(size) < 1 << 40:
        os.truncate(
            path, path.stat().st_size + max(size, 0)
        )  # sparse, so that the file is as long as it says
    with pytest.raises(
        SupplyError, match=r"announces .* bytes, expected 1 to|expected a name, a size and a sha256"
    ):
        import_bundle(path, tmp_path / "cache")
    assert list_imported_roots(tmp_path / "cache") == ()


def test_a_bomb_that_announces_its_size_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file: 32 GiB announced and there, no bytes on the disk."""
    places = [(name_entry(key=f"{number:02x}" * 32), 4 << 30, sha(b"")) for number in range(17)]
    path = craft_bundle(tmp_path / "x.bundle", places, b"")
    os.truncate(path, path.stat().st_size + 17 * (4 << 30))
    monkeypatch.setattr(
        bundle_module.Bundle, "iter_files", None
    )  # reading would be an error of its own
    assert import_refused(path, tmp_path / "cache") == "size"
    os.truncate(path, path.stat().st_size - 2 * (4 << 30))
    assert import_refused(path, tmp_path / "cache") == "size"


@pytest.mark.parametrize("extra", [-1, 1, 1 << 20])
def test_a_bomb_that_hides_its_size_is_refused(tmp_path: Path, extra: int) -> None:
    """More or less in the file than its manifest announces."""
    path = craft_bundle(tmp_path / "x.bundle", *of((ENTRY_NAME, ENTRY)))
    os.truncate(path, path.stat().st_size + extra)
    assert import_refused(path, tmp_path / "cache") == "size"


def test_more_files_than_allowed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_module, "FILES_LIMIT", 3)
    files, payload = of(*((name_entry(key=f"{number:02x}" * 32), b"x") for number in range(4)))
    assert (
        import_refused(craft_bundle(tmp_path / "x.bundle", files, payload), tmp_path / "cache")
        == "names"
    )
    assert (
        import_refused(
            craft_bundle(tmp_path / "y.bundle", files * 9, payload * 9), tmp_path / "cache"
        )
        == "count"
    )


HUNGRY = {
    "objects": b"[" + b"{}," * 2_000_000 + b"{}]",
    "escaped brackets": b'{"a":"' + b"\\u005b" * 100 + b'"}',
}


@pytest.mark.parametrize("header", HUNGRY.values(), ids=HUNGRY)
def test_a_header_that_wants_memory_is_refused_before_it_is_parsed(
    tmp_path: Path, header: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_module.json, "loads", None)
    assert import_refused(frame_file(tmp_path / "x.bundle", header), tmp_path / "cache") in (
        "count",
        "form",
    )


def test_duplicate_and_unordered_names_are_refused(tmp_path: Path) -> None:
    files, payload = of((ENTRY_NAME, ENTRY), (RECORD_NAME, RECORD))
    assert (
        import_refused(
            craft_bundle(tmp_path / "x.bundle", [files[0], files[0]], payload), tmp_path / "cache"
        )
        == "names"
    )
    assert (
        import_refused(
            craft_bundle(tmp_path / "y.bundle", files[::-1], payload), tmp_path / "cache"
        )
        == "names"
    )


def test_a_header_that_says_more_than_its_manifest_is_refused(tmp_path: Path) -> None:
    """A second reader (another safetensors library) would see another bundle."""
    files, payload = of((ENTRY_NAME, ENTRY))
    overlap = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    for number, change in enumerate(
        ({"../../x": overlap}, {"__metadata__": {}}, {ENTRY_NAME: overlap})
    ):
        rule = import_refused(
            craft_bundle(tmp_path / f"{number}.bundle", files, payload, **change),
            tmp_path / "cache",
        )
        assert rule == "form"
    honest = craft_bundle(tmp_path / "x.bundle", files, payload).read_bytes()
    length = int.from_bytes(honest[:8], "little")
    twice = (
        honest[8 : 8 + length].rstrip()[:-1]
        + b',"'
        + ENTRY_NAME.encode()
        + b'":'
        + canonical_json(overlap).encode()
        + b"}"
    )
    assert (
        import_refused(frame_file(tmp_path / "twice.bundle", twice, payload), tmp_path / "cache")
        == "form"
    )


@pytest.mark.parametrize(
    "body",
    [
        {"format": 2},
        {"format": None},
        {"files": {}},
        {"files": [1]},
        {"files": [["a"]]},
        {"more": 1},
    ],
    ids=canonical_json,
)
def test_a_manifest_of_another_form_is_refused(tmp_path: Path, body: dict[str, Any]) -> None:
    path = craft_bundle(tmp_path / "x.bundle", *of((ENTRY_NAME, ENTRY)), body=body)
    assert import_refused(path, tmp_path / "cache") in ("form", "format", "count")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(ENTRY)
    zipped, tarred = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../x", b"0" * 1_000_000)
    with tarfile.open(fileobj=tarred, mode="w:gz") as archive:
        link = tarfile.TarInfo(ENTRY_NAME)
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    deep = b'{"__metadata__":{"' + METADATA_KEY.encode() + b'":' + b"[" * 100_000
    for number, content in enumerate(
        (
            b"",
            b"\0" * 8,
            zipped.getvalue(),
            tarred.getvalue(),
            pickle.dumps([1]),
            ENTRY,
            b"\xff" * 64,
        )
    ):
        (tmp_path / "x.bundle").write_bytes(content)
        assert import_refused(tmp_path / "x.bundle", tmp_path / "cache") == "form", number
    assert import_refused(frame_file(tmp_path / "x.bundle", deep), tmp_path / "cache") == "form"


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(SupplyError, match="no regular file"):
            import_bundle(path, tmp_path / "cache")
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises((OSError, SupplyError)):
            import_bundle(path, tmp_path / "cache")


def test_truncated_at_any_byte_is_refused(tmp_path: Path) -> None:
    complete = bundle_of(fill_cache(tmp_path / "full"), tmp_path / "whole.bundle").read_bytes()
    cut = tmp_path / "cut.bundle"
    cut.write_bytes(complete)
    for size in reversed(range(len(complete))):
        os.truncate(cut, size)
        with pytest.raises(SupplyError) as raised, open_bundle(cut):
            pass
        assert raised.value.rule in ("size", "form"), size
    for size in (0, 1, 8, 9, len(complete) // 2, len(complete) - 1):
        cut.write_bytes(complete[:size])
        import_refused(cut, tmp_path / "cache")


def test_a_changed_byte_anywhere_is_refused(tmp_path: Path) -> None:
    complete = bytearray(
        bundle_of(fill_cache(tmp_path / "full"), tmp_path / "whole.bundle").read_bytes()
    )
    changed = tmp_path / "changed.bundle"
    for offset in range(0, len(complete), 211):
        complete[offset] ^= 0x20
        changed.write_bytes(complete)
        assert import_refused(changed, tmp_path / "cache") in (
            "form",
            "size",
            "digest",
            "names",
            "count",
            "format",
        ), offset
        complete[offset] ^= 0x20


WRONG_CONTENT = {
    "noise with the right digest": (ENTRY_NAME, os.urandom(4096)),
    "an entry cut short": (ENTRY_NAME, ENTRY[:-1]),
    "another family": (name_entry(GPU), ENTRY),
    "another key": (name_entry(key=OTHER_KEY), ENTRY),
    "another contract": (name_entry(precision="strict"), ENTRY),
    "a family that is no plain name": (
        ENTRY_NAME,
        encode_entry(make_entry(target=dataclasses.replace(HERE, arch="../x"))),
    ),
    "an entry as a decision record": (RECORD_NAME, ENTRY),
    "a decision record as an entry": (ENTRY_NAME, RECORD),
    "a decision record of another name": (
        RECORD_NAME,
        encode_record(OTHER_KEY, {}, HERE, CONTRACT),
    ),
    "a decision record of another family": (RECORD_NAME, encode_record(NAME, {}, GPU, CONTRACT)),
    "a decision record that is no JSON": (RECORD_NAME, b"["),
}


@pytest.mark.parametrize("wrong", WRONG_CONTENT.values(), ids=WRONG_CONTENT)
def test_content_that_does_not_belong_is_refused_with_all_that_came_before(
    tmp_path: Path, wrong: tuple[str, bytes]
) -> None:
    good = (
        "0/v1/aaa-a/" + ENTRY_NAME.split("/", 3)[3],
        encode_entry(make_entry(target=dataclasses.replace(HERE, device="aaa", arch="a"))),
    )
    path = craft_bundle(tmp_path / "x.bundle", *of(good, wrong))
    assert import_refused(path, tmp_path / "cache") == "content"
    assert (
        import_bundle(craft_bundle(tmp_path / "y.bundle", *of(good)), tmp_path / "cache").entries
        == 1
    )


def test_a_digest_that_differs_is_refused(tmp_path: Path) -> None:
    path = craft_bundle(tmp_path / "x.bundle", [(ENTRY_NAME, len(ENTRY), sha(b"other"))], ENTRY)
    assert import_refused(path, tmp_path / "cache") == "digest"
