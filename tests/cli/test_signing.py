"""`keys`, `sign`, `revoke`, and what `list`, `show` and `verify` say about who vouches, over real
folders.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.cache_cases import put_entry, run_command
from torch_cudal1.__main__ import main
from torch_cudal1.cli.commands import doctor
from torch_cudal1.core.settings import Settings


@pytest.fixture
def team_folder(tmp_path: Path) -> Path:
    put_entry(tmp_path / "shared", 4, "first")
    put_entry(tmp_path / "shared", 8, "second")
    return tmp_path / "shared"


@pytest.fixture
def key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A private key; its public key is in publishers.toml, as the command printed it."""
    code, out = run_command(
        capsys,
        "keys",
        "new",
        "team",
        "--out",
        str(tmp_path / "team.pem"),
        "--cache-dir",
        str(tmp_path / "own"),
    )
    assert code == 0
    (tmp_path / "publishers.toml").write_text(out)
    return tmp_path / "team.pem"


def elsewhere(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[int, Any]:
    """A command of a machine that reads the shared folder and allows the key."""
    lists = (
        "--publishers",
        str(folder / "publishers.toml"),
        "--cache-dir",
        str(folder / "own"),
        "--json",
    )
    code, out = run_command(capsys, *arguments, *lists)
    return code, json.loads(out)


@pytest.fixture(autouse=True)
def reads_the_shared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDAL1_READ_ONLY_CACHES", str(tmp_path / "shared"))


def test_what_keys_new_prints_is_the_list_it_belongs_into(key: Path, tmp_path: Path) -> None:
    ((publisher,),) = tomllib.loads((tmp_path / "publishers.toml").read_text()).values()
    assert publisher["name"] == "team"
    assert key.stat().st_mode & 0o777 == 0o600
    assert publisher["key"].removeprefix("ed25519:") not in key.read_text()


def test_a_key_is_not_made_inside_a_cache(
    tmp_path: Path, team_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path / "own", team_folder):
        path = folder / "team.pem"
        assert (
            main(["keys", "new", "team", "--out", str(path), "--cache-dir", str(tmp_path / "own")])
            == 2
        )
        assert "outside the cache" in capsys.readouterr().err
        assert not path.exists()


def test_before_signing_nobody_vouches_and_afterwards_the_publisher_does(
    key: Path, team_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, before = elsewhere(capsys, tmp_path, "list")
    assert {entry["vouched_by"] for entry in before["entries"]} == {None}
    assert elsewhere(capsys, tmp_path, "verify")[1]["vouched"] == {
        "signed": 0,
        "refused": 0,
        "vouched for by nobody": 2,
    }
    code, out = run_command(capsys, "sign", str(key), "--cache-dir", str(team_folder), "--json")
    assert (code, len(json.loads(out)["signed"])) == (0, 2)
    _, after = elsewhere(capsys, tmp_path, "list")
    assert {entry["vouched_by"] for entry in after["entries"]} == {"publisher 'team'"}
    code, document = elsewhere(capsys, tmp_path, "verify")
    assert (code, document["vouched"]) == (
        0,
        {"signed": 2, "refused": 0, "vouched for by publisher 'team'": 2},
    )
    assert [row["digest"] for row in before["entries"]] == [
        row["digest"] for row in after["entries"]
    ]


def test_one_entry_may_be_signed_by_its_key(
    key: Path, team_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = elsewhere(capsys, tmp_path, "list")[1]["entries"][0]
    assert (
        run_command(capsys, "sign", str(key), first["key"][:12], "--cache-dir", str(team_folder))[0]
        == 0
    )
    _, (shown,) = elsewhere(capsys, tmp_path, "show", first["key"])
    assert shown["vouched_by"] == "publisher 'team'"
    assert sorted(elsewhere(capsys, tmp_path, "verify")[1]["vouched"].values()) == [0, 1, 1, 1]
    assert main(["sign", str(key), "ffff", "--cache-dir", str(team_folder)]) == 2
    assert "`cudal1 list`" in capsys.readouterr().err


def test_verify_finds_a_signature_that_does_not_fit_in_the_own_cache_too(
    key: Path, team_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(capsys, "sign", str(key), "--cache-dir", str(team_folder))[0] == 0
    path = sorted(team_folder.rglob("*.safetensors"))[0]
    content = path.read_bytes()
    at = content.index(b"value", content.index(b"signatures")) + 12
    path.write_bytes(
        content[:at] + (b"0" if content[at : at + 1] != b"0" else b"1") + content[at + 1 :]
    )
    code, out = run_command(capsys, "verify", "--cache-dir", str(team_folder), "--json")
    document = json.loads(out)
    assert (code, document["broken"]) == (1, [])
    assert {(row["path"], "does not fit" in row["reason"]) for row in document["refused"]} == {
        (str(path), True)
    }


def test_revoke_takes_entries_programs_and_keys(
    key: Path, team_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command(capsys, "sign", str(key), "--cache-dir", str(team_folder))
    first, second = elsewhere(capsys, tmp_path, "list")[1]["entries"]
    lists = ("--revoked", str(tmp_path / "revoked.toml"))
    assert (
        elsewhere(capsys, tmp_path, "revoke", first["key"][:12], "--reason", 'bad "NaN"', *lists)[0]
        == 0
    )
    code, document = elsewhere(capsys, tmp_path, "verify", *lists)
    assert (code, [row["reason"] for row in document["refused"]]) == (1, ['revoked: bad "NaN"'])
    code, _ = elsewhere(
        capsys,
        tmp_path,
        "revoke",
        f"entry:{second['digest']}",
        "program:" + "ab" * 32,
        "--reason",
        "x",
        *lists,
    )
    assert (code, len(elsewhere(capsys, tmp_path, "verify", *lists)[1]["refused"])) == (0, 2)
    public = tomllib.loads((tmp_path / "publishers.toml").read_text())["publisher"][0]["key"]
    elsewhere(capsys, tmp_path, "revoke", public, "--reason", "lost", *lists)
    records = tomllib.loads((tmp_path / "revoked.toml").read_text())["revoked"]
    assert [sorted(set(record) - {"reason"}) for record in records] == [
        ["entry"],
        ["entry"],
        ["program"],
        ["key"],
    ]
    assert main(["sign", str(key), "--cache-dir", str(team_folder), *lists]) == 2
    assert "a key that is not revoked (lost)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["revoke", "ffff", "--reason", "x", "--revoked", "r.toml"], "entry:DIGEST"),
        (["revoke", "ed25519:12", "--reason", "x", "--revoked", "r.toml"], "64 hex digits"),
        (["revoke", "entry:12", "--reason", "x", "--revoked", "r.toml"], "is no digest"),
        (["revoke", "entry:" + "ab" * 32, "--reason", " ", "--revoked", "r.toml"], "reason is ' '"),
        (["revoke", "ffff", "--reason", "x"], "TORCH_CUDAL1_REVOKED"),
        (["keys", "new"], "NAME"),
        (["keys", "list", "team"], "nothing beside"),
        (["sign", "none.pem"], "FileNotFoundError"),
    ],
)
def test_wrong_usage_is_2_says_what_is_expected_and_writes_nothing(
    arguments: list[str],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--cache-dir", "own"]) == 2
    assert reason in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.suffix != ".lock"]


def test_an_unusable_list_is_found_by_keys_list_and_verify(
    key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = elsewhere(capsys, tmp_path, "keys", "list")
    assert (code, list(document["publishers"]["names"].values())) == (0, ["team"])
    (tmp_path / "publishers.toml").write_text("[[publisher]]\nname = 3\n")
    for command in (("keys", "list"), ("verify",)):
        code, document = elsewhere(capsys, tmp_path, *command)
        assert code == 1
        assert "line 1: name is 3" in document["problems"][0]


def test_the_doctor_says_whom_this_machine_believes(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publishers = tmp_path / "publishers.toml"

    def trust(**settings: Any) -> doctor.HealthCheck:
        return next(
            f for f in doctor.examine(Settings(cache_dir=tmp_path, **settings)) if f.name == "trust"
        )

    assert (trust().ok, "0 publishers allowed" in trust().what) == (True, True)
    assert (
        trust(publishers=publishers).ok,
        "1 publisher allowed" in trust(publishers=publishers).what,
    ) == (True, True)
    monkeypatch.setattr(doctor, "_version", lambda name: "")
    assert "torch-cudal1[sign]" in trust(publishers=publishers).remedy
    publishers.write_text("[[publisher]]\nname = 3\n")
    assert (
        trust(publishers=publishers).ok,
        "line 1: name is 3" in trust(publishers=publishers).what,
    ) == (False, True)
