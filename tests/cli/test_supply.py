"""`lock`, `export`, `import`, `coverage` from the command line: what they write, what they refuse,
and with which exit code.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_cudal1
from tests.entries import plant
from torch_cudal1.__main__ import main
from torch_cudal1.api import targets
from torch_cudal1.ir.records import Contract, Entry
from torch_cudal1.store.bundle.imported import list_imported_roots
from torch_cudal1.store.cache.inventory import take_inventory
from torch_cudal1.store.cache.local_cache import LocalCache

MODEL = """\
import torch
from torch import nn

def make(): return nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), (torch.ones(2, 8),)
def other(): return nn.Linear(8, 4).eval(), (torch.ones(2, 8),)
def sparse(): return nn.Identity().eval(), (torch.eye(3).to_sparse(),)
"""


@dataclass(frozen=True)
class CommandResult:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(scope="module")
def folder_with_decision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a cache that has a decision for it, and none for the other one."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "model.py").write_text(MODEL)
    (loaded,) = targets.load(f"{folder / 'model.py'}:make")
    with torch.no_grad():
        plant(loaded.module, loaded.inputs, folder / "cache")
    return folder


@pytest.fixture
def here(folder_with_decision: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it as the working directory."""
    shutil.copytree(folder_with_decision, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def run(
    capsys: pytest.CaptureFixture[str], *arguments: object, cache: str = "cache"
) -> CommandResult:
    code = main([*map(str, arguments), "--cache-dir", cache])
    shown = capsys.readouterr()
    return CommandResult(code, shown.out, shown.err)


# lock
# ----------------------------------------------------------------------------------------------------------------------------


def test_a_lock_is_written_and_agrees_with_its_cache(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(capsys, "lock", "model.py:make", "--device", "cpu")
    assert (result.code, result.out) == (
        0,
        "cudal1.lock: 1 entry and 1 decision record for cpu-x86_64\n",
    )
    body = json.loads((here / "cudal1.lock").read_text())
    assert list(body["targets"]) == ["model.py:make"]
    assert body["targets"]["model.py:make"] == [body["entries"][0]["key"]]
    (here / "model.py").unlink()
    result = run(capsys, "lock", "--check")
    assert (result.code, result.out) == (0, "cudal1.lock: 1 entry as locked\n"), (
        "nothing but files is read"
    )


def test_lock_check_fails_with_a_table_where_the_cache_differs(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "lock")
    result = run(capsys, "lock", "--check", cache="empty")
    assert result.code == 1
    assert result.err == "cudal1: cudal1.lock and the cache differ in 3 places\n"
    assert ["missing" in line for line in result.out.splitlines()] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert not (here / "empty").exists()
    document = run(capsys, "lock", "--check", "--json", cache="empty").document
    assert {row["kind"] for row in document["differences"]} == {"missing"}


def test_no_lock_is_written_for_a_target_that_is_not_decided(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(capsys, "lock", "model.py:make", "model.py:other", "--device", "cpu")
    assert result.code == 1
    assert "model.py:other" in result.out
    assert "model.py:make" not in result.out
    assert "1 region not decided, so no lock was written" in result.err
    assert not (here / "cudal1.lock").exists()
    assert (
        run(capsys, "lock", "model.py:make", "--family", "cuda-sm_90", "--device", "cpu").code == 1
    )


def test_lock_check_takes_no_target(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "lock")
    result = run(capsys, "lock", "--check", "model.py:make")
    assert result.code == 2
    assert "the lock says what it is of" in result.err


def test_lock_check_without_a_lock_says_how_to_write_one(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(capsys, "lock", "--check")
    assert result.code == 1
    assert (
        result.err
        == "cudal1: cudal1.lock refused by rule 'form': absent; `cudal1 lock` writes it\n"
    )


# export and import
# ---------------------------------------------------------------------------------------------------------------


def test_a_bundle_goes_from_one_cache_to_another(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "lock").code == 0
    result = run(capsys, "export", "kernels.bundle")
    assert result.code == 0
    assert result.out.startswith("kernels.bundle: 1 entry and 2 decision records for cpu-x86_64, ")
    result = run(capsys, "import", "kernels.bundle", cache="new")
    assert result.code == 0
    assert "1 entry, 2 decision records" in result.out
    assert run(capsys, "lock", "--check", cache="new").code == 0
    assert "without a signature that counts here" in result.out
    assert "was there already" in run(capsys, "import", "kernels.bundle", cache="new").out
    assert len(run(capsys, "list", "--json", cache="new").document["entries"]) == 1
    assert run(capsys, "export", "again.bundle", cache="new").code == 0
    assert (here / "again.bundle").read_bytes() == (here / "kernels.bundle").read_bytes()


def test_export_takes_the_start_of_a_key_and_refuses_what_fits_none(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (entry,) = run(capsys, "list", "--json").document["entries"]
    assert run(capsys, "export", "x.bundle", entry["key"][:6], "--json").document["aliases"] == 1
    for arguments in (("zz",), ("--family", "cuda-sm_90")):
        assert run(capsys, "export", "y.bundle", *arguments).code == 2
    assert not (here / "y.bundle").exists()


def test_export_by_lock_takes_exactly_that(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "lock", "model.py:make", "--device", "cpu")
    (loaded,) = targets.load("model.py:other")
    with torch.no_grad():
        plant(loaded.module, loaded.inputs, here / "cache")
    assert run(capsys, "export", "all.bundle", "--json").document["entries"] == 2
    assert (
        run(capsys, "export", "x.bundle", "--lock", "cudal1.lock", "--json").document["entries"]
        == 1
    )
    result = run(capsys, "export", "y.bundle", "--lock", "cudal1.lock", cache="empty")
    assert result.code == 1
    assert "2 of what it names cannot be exported (missing: " in result.err
    assert not (here / "y.bundle").exists()


def test_a_broken_entry_is_told_and_left_out(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (loaded,) = targets.load("model.py:other")
    with torch.no_grad():
        plant(loaded.module, loaded.inputs, here / "cache")
    broken = next((here / "cache").rglob("*.safetensors"))
    broken.write_bytes(b"damage")
    result = run(capsys, "export", "x.bundle", "--json")
    assert (result.code, result.document["entries"]) == (1, 1)
    assert f"{broken.relative_to(here)} is left out: unreadable" in result.err


def test_a_refused_bundle_is_named_with_its_rule(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "export", "x.bundle")
    content = bytearray((here / "x.bundle").read_bytes())
    content[-1] ^= 1
    (here / "x.bundle").write_bytes(content)
    result = run(capsys, "import", "x.bundle", cache="new")
    assert result.code == 1
    assert result.err.startswith("cudal1: x.bundle refused by rule 'digest': 0/v1/")
    assert list_imported_roots(here / "new") == ()
    assert run(capsys, "import", "absent.bundle", cache="new").code == 2


# coverage
# ------------------------------------------------------------------------------------------------------------------------


def test_coverage_says_what_a_deployment_will_have(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "lock", "model.py:make", "--device", "cpu")
    line = ("coverage", "cudal1.lock", "model.py:make", "--device", "cpu", "--json")
    result = run(capsys, *line)
    assert result.code == 0
    statuses = [(row["source"], row["status"], row["runs"]) for row in result.document["coverage"]]
    assert (
        statuses
        == [
            ("model.py:make", "decided", "planted -> eager"),
            ("model.py:make", "measured", "cudal1"),
        ]
        * 2
    )
    assert run(capsys, *line, cache="empty").code == 1
    assert run(capsys, *line, "--family", "cuda-sm_90").document["missing"] == 2
    result = run(capsys, "coverage", "cudal1.lock", "--sku", "NVIDIA H200")
    assert result.code == 1
    assert "0 of 1 region served; 1 missing" in result.out


def test_coverage_tells_what_has_no_region(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(
        capsys, "coverage", "model.py:sparse", "model.py:other", "--device", "cpu", "--json"
    )
    assert [row["status"] for row in result.document["coverage"]] == ["left out", "missing"]
    assert result.code == 1


def test_coverage_is_what_explain_finds(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where nobody vouches for what was imported: then a start has nothing, and both say so."""
    run(capsys, "export", "x.bundle")
    run(capsys, "import", "x.bundle", cache="new")
    for cache, code in (("cache", 0), ("new", 1)):
        assert (
            len(take_inventory(LocalCache(here / cache, list_imported_roots(here / cache))).entries)
            == 1
        )
        for command in (("coverage",), ("explain", "--fail-on-miss", "--quiet")):
            assert (
                run(capsys, *command, "model.py:make", "--device", "cpu", cache=cache).code == code
            ), command


def test_coverage_and_lock_speak_of_what_production_called(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (loaded,) = targets.load("model.py:make")
    module = torch_cudal1.accelerate(loaded.module, cache_dir=here / "scratch")
    with torch_cudal1.record(here / "seen.jsonl"), torch.no_grad():
        for rows in (2, 2, 2, 4):
            module(torch.ones(rows, 8))
    line = ("model.py:make", "--recorded", "seen.jsonl", "--device", "cpu")
    result = run(capsys, "coverage", *line, "--json")
    statuses = [(row["source"], row["status"]) for row in result.document["coverage"]]
    decided, unknown = "model.py:make (2x8 float32)", "model.py:make (4x8 float32)"
    assert statuses == [(decided, "decided"), (decided, "measured"), (unknown, "missing")]
    assert result.code == 1
    assert run(capsys, "lock", *line).code == 1
    with torch.no_grad():
        plant(torch_cudal1.restore(module), torch.ones(4, 8), here / "cache")
    assert run(capsys, "coverage", *line).code == run(capsys, "lock", *line).code == 0
    assert sorted(json.loads((here / "cudal1.lock").read_text())["targets"]) == [decided, unknown]
    assert run(capsys, "lock", "model.py:other", *line[1:]).code == 2, (
        "the recording holds no call of it"
    )


def test_what_was_revoked_is_neither_locked_nor_exported(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "lock").code == 0
    (entry,) = json.loads((here / "cudal1.lock").read_text())["entries"]
    (here / "revoked.toml").write_text(
        f'[[revoked]]\nentry = "{entry["digest"]}"\nreason = "wrong for NaN"\n'
    )
    (here / "revoked.toml").chmod(0o600)
    revoked_options = ("--revoked", "revoked.toml")
    result = run(capsys, "export", "x.bundle", *revoked_options)
    assert result.code == 2
    assert "is left out: revoked: wrong for NaN" in result.err
    assert run(capsys, "lock", "model.py:make", "--device", "cpu", *revoked_options).code == 1
    result = run(capsys, "lock", "--check", "--json", *revoked_options)
    assert (result.code, [row["kind"] for row in result.document["differences"]]) == (
        1,
        ["missing"],
    )
    assert run(capsys, "lock", "--check").code == 0


def test_a_lock_of_targets_is_of_one_precision(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("lock", "model.py:make", "--device", "cpu")
    assert run(capsys, *line).code == 0
    result = run(capsys, *line, "--precision", "strict", "--lock", "strict.lock", "--json")
    assert (result.code, [row["status"] for row in result.document["missing"]]) == (1, ["missing"])
    assert not (here / "strict.lock").exists()
    (stored_entry,) = take_inventory(LocalCache(here / "cache")).entries
    assert isinstance(stored_entry.content, Entry)
    LocalCache(here / "cache").put(
        dataclasses.replace(stored_entry.content, contract=Contract("strict"))
    )
    assert run(capsys, "lock", "--check").code == 0, (
        "an entry of another precision is none of its business"
    )
    assert run(capsys, *line, "--precision", "strict", "--lock", "strict.lock").code == 0
    pinned = json.loads((here / "strict.lock").read_text())["entries"]
    assert [row["precision"] for row in pinned] == ["strict"]
