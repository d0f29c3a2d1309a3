"""Nothing from elsewhere is vouched for unless a publisher on the list signed exactly that; every
way around it is tried.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.signing import allow, change_metadata, make_signer, write_revocations
from tests.store.conftest import CONTRACT, HERE, make_entry
from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.store.cache.cache_paths import entry_path, record_path
from torch_cudal1.store.cache.entry_file import encode_entry, open_entry, sign_entry
from torch_cudal1.store.cache.local_cache import EntryFile, LocalCache
from torch_cudal1.store.cache.resolve import Hit
from torch_cudal1.store.trust import lists
from torch_cudal1.store.trust.signatures import Signer, create_key, load_signer, parse_signatures
from torch_cudal1.store.trust.trust_policy import Rules

KEY = make_entry().region_key
NAME = "cd" * 32


@dataclasses.dataclass(frozen=True)
class Team:
    """A publisher who signed one entry in a shared folder, and a machine that allows his key."""

    folder: Path
    signer: Signer

    @property
    def shared(self) -> LocalCache:
        return LocalCache(self.folder / "shared")

    @property
    def path(self) -> Path:
        return entry_path(self.shared.root, KEY, HERE, CONTRACT)

    @property
    def digest(self) -> str:
        (file,) = self.shared.iter_entries()
        assert isinstance(file, EntryFile)
        return file.digest

    def rules(self, policy: str = "judge", revoked: Path | None = None) -> Rules:
        return Rules(policy, self.folder / "publishers.toml", revoked)  # type: ignore[arg-type]

    def machine(self, rules: Rules | None = None) -> LocalCache:
        """A cache of its own that reads the shared folder."""
        return LocalCache(self.folder / "own", (self.shared.root,), rules=rules or self.rules())

    def told(self, rules: Rules | None = None, contract: Contract = CONTRACT) -> str:
        """Why the machine does not use the entry as it is, under both policies: a reason in either."""
        rules_used = rules or self.rules()
        hit = self.machine(rules_used).get(KEY, HERE, contract)
        if isinstance(hit, Hit):
            assert not hit.vouched_by, "it would be run"
            assert hit.stale
        strict = self.machine(dataclasses.replace(rules_used, policy="signed")).get(
            KEY, HERE, contract
        )
        assert isinstance(strict, Refusal), "it would be run"
        return strict.reason


@pytest.fixture
def team(tmp_path: Path) -> Team:
    team = Team(tmp_path, make_signer(tmp_path))
    team.shared.put(make_entry(), {"in0": torch.ones(3)})
    assert team.shared.sign(team.signer).files == (team.path,)
    allow(tmp_path / "publishers.toml", team=team.signer.public)
    return team


# What is vouched for
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["judge", "signed"])
def test_a_signature_of_an_allowed_publisher_is_enough(team: Team, policy: str) -> None:
    hit = team.machine(team.rules(policy)).get(KEY, HERE, CONTRACT)
    assert isinstance(hit, Hit)
    assert (hit.vouched_by, hit.stale, hit.digest) == ("publisher 'team'", None, team.digest)


def test_the_own_cache_and_the_shipped_folder_need_no_signature(tmp_path: Path) -> None:
    own_cache, shipped = LocalCache(tmp_path / "own"), LocalCache(tmp_path / "shipped")
    shipped.put(make_entry())
    hit = LocalCache(own_cache.root, rules=Rules("signed"), shipped=shipped.root).get(
        KEY, HERE, CONTRACT
    )
    assert isinstance(hit, Hit)
    assert hit.vouched_by == "torch-cudal1"
    own_cache.put(make_entry())
    hit = LocalCache(own_cache.root, rules=Rules("signed")).get(KEY, HERE, CONTRACT)
    assert isinstance(hit, Hit)
    assert hit.vouched_by == "this cache"


def test_a_second_signature_is_kept_beside_the_first_and_one_good_one_is_enough(
    team: Team, tmp_path: Path
) -> None:
    other = make_signer(tmp_path, "other")
    assert team.shared.sign(other).files == (team.path,)
    opened = open_entry(team.path.read_bytes())
    assert not isinstance(opened, Refusal)
    assert {signature.key for signature in opened.signatures} == {team.signer.public, other.public}
    revoked = write_revocations(tmp_path / "revoked.toml", key=other.public)
    hit = team.machine(team.rules("signed", revoked)).get(KEY, HERE, CONTRACT)
    assert isinstance(hit, Hit)


def test_signing_changes_neither_digest_nor_any_other_byte_of_the_text_and_twice_is_once(
    team: Team,
) -> None:
    plain = encode_entry(make_entry(), {"in0": torch.ones(3)})
    signed = team.path.read_bytes()
    assert change_metadata(signed, lambda meta: meta.pop("signatures")) == plain
    assert sign_entry(plain, team.signer) == signed == sign_entry(signed, team.signer)
    assert team.shared.sign(team.signer).unchanged == (team.path,)


def test_a_vouched_entry_after_an_unknown_one_is_taken(team: Team, tmp_path: Path) -> None:
    unknown = LocalCache(tmp_path / "unknown")
    unknown.put(make_entry(package="unknown"))
    cache = LocalCache(tmp_path / "own", (unknown.root, team.shared.root), rules=team.rules())
    hit = cache.get(KEY, HERE, CONTRACT)
    assert isinstance(hit, Hit)
    assert hit.entry.package != "unknown"


# Attacks on a signed file
# ------------------------------------------------------------------------------------------------------


def test_no_flipped_bit_is_vouched_for(team: Team) -> None:
    content = team.path.read_bytes()
    start = content.index(b"signatures")
    places = {*range(0, len(content), 13), *range(start, start + 320, 3)}
    machine = team.machine()
    for place in sorted(places):
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place % 8)
        team.path.write_bytes(flipped)
        hit = machine.get(KEY, HERE, CONTRACT)
        assert isinstance(hit, Refusal) or not hit.vouched_by, place
    team.path.write_bytes(content)
    assert isinstance(machine.get(KEY, HERE, CONTRACT), Hit)


def _signature(meta: dict[str, Any], value: Callable[[str], str]) -> None:
    meta["signatures"][0]["value"] = value(meta["signatures"][0]["value"])


ATTACKS: dict[str, tuple[Callable[[dict[str, Any]], object], bool, str]] = {
    "the signature deleted": (lambda meta: meta.pop("signatures"), False, "nobody signed it"),
    "a truncated signature": (
        lambda meta: _signature(meta, lambda text: text[:-2]),
        False,
        "63 bytes, expected 64",
    ),
    "an empty signature": (
        lambda meta: _signature(meta, lambda text: ""),
        False,
        "0 bytes, expected 64",
    ),
    "a signature of zeros": (
        lambda meta: _signature(meta, lambda text: "00" * 64),
        False,
        "does not fit",
    ),
    "a longer signature": (
        lambda meta: _signature(meta, lambda text: text + "00"),
        False,
        "65 bytes",
    ),
    "no hex": (lambda meta: _signature(meta, lambda text: "zz" + text[2:]), False, "unreadable"),
    "an empty list": (lambda meta: meta.update(signatures=[]), False, "unreadable"),
    "one key twice": (
        lambda meta: meta.update(signatures=meta["signatures"] * 2),
        False,
        "unreadable",
    ),
    "something more in it": (
        lambda meta: meta["signatures"][0].update(name="team"),
        False,
        "unreadable",
    ),
    "evidence improved": (
        lambda meta: meta["evidence"]["timing"].update(low=9.0),
        True,
        "does not fit",
    ),
    "another judge claimed": (
        lambda meta: meta["target"].update(sku="NVIDIA H200"),
        True,
        "does not fit",
    ),
    "evidence improved, digest old": (
        lambda meta: meta["evidence"]["timing"].update(low=9.0),
        False,
        "digest",
    ),
    "another region": (
        lambda meta: meta["region"].update(key="ef" * 32),
        True,
        "it holds the entry of",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_altered_file_is_not_used(team: Team, attack: str) -> None:
    change, digest_fits, reason = ATTACKS[attack]
    content = change_metadata(team.path.read_bytes(), change, digest_fits=digest_fits)
    assert content != team.path.read_bytes()
    team.path.write_bytes(content)
    assert reason in team.told()


def test_a_signature_from_another_entry_is_not_taken(team: Team) -> None:
    other = sign_entry(encode_entry(make_entry(package="2")), team.signer)
    assert isinstance(other, bytes)
    opened = open_entry(other)
    assert not isinstance(opened, Refusal)
    copied = [signature.to_json() for signature in opened.signatures]
    team.path.write_bytes(
        change_metadata(team.path.read_bytes(), lambda meta: meta.update(signatures=copied))
    )
    assert "does not fit" in team.told()


def test_a_signature_over_a_decision_record_is_none_over_an_entry_of_that_digest(
    team: Team,
) -> None:
    forged = [team.signer.sign("alias", team.digest).to_json()]
    team.path.write_bytes(
        change_metadata(team.path.read_bytes(), lambda meta: meta.update(signatures=forged))
    )
    assert "does not fit" in team.told()


def test_a_signed_entry_is_not_used_for_another_contract_or_target(team: Team) -> None:
    strict = dataclasses.replace(CONTRACT, precision="strict")
    there = entry_path(team.shared.root, KEY, HERE, strict)
    there.parent.mkdir(parents=True)
    there.write_bytes(team.path.read_bytes())
    assert "it holds the entry of" in team.told(contract=strict)
    there.write_bytes(
        change_metadata(
            team.path.read_bytes(),
            lambda meta: meta["contract"].update(precision="strict"),
            digest_fits=True,
        )
    )
    assert "does not fit" in team.told(contract=strict)
    gpu = dataclasses.replace(HERE, device="cuda", arch="sm_90")
    moved = entry_path(team.shared.root, KEY, gpu, CONTRACT)
    moved.parent.mkdir(parents=True)
    moved.write_bytes(team.path.read_bytes())
    assert isinstance(team.machine().get(KEY, gpu, CONTRACT), Refusal)


def test_a_key_that_is_not_on_the_list_counts_for_nothing(team: Team, tmp_path: Path) -> None:
    allow(tmp_path / "publishers.toml", other=make_signer(tmp_path, "other").public)
    assert "not on the list of publishers" in team.told()
    assert "not on the list of publishers" in team.told(Rules())


def test_a_revoked_key_counts_for_nothing_and_is_not_even_judged(
    team: Team, tmp_path: Path
) -> None:
    rules = team.rules(revoked=write_revocations(tmp_path / "revoked.toml", key=team.signer.public))
    assert "signed with the revoked key" in team.told(rules)
    assert isinstance(team.machine(rules).get(KEY, HERE, CONTRACT), Refusal)


def test_without_the_library_no_signature_counts_and_the_reason_names_it(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert "torch-cudal1[sign]" in team.told()
    with pytest.raises(SettingError, match=r"torch-cudal1\[sign\]"):
        load_signer(team.folder / "keys" / "team.pem", keep_out_of=())
    with pytest.raises(SettingError, match=r"torch-cudal1\[sign\]"):
        create_key("new", team.folder / "new.pem", keep_out_of=())


def test_a_thousand_signatures_are_not_a_thousand_verifications(team: Team) -> None:
    many = [{"key": f"ed25519:{number:064x}", "value": "00" * 64} for number in range(1000)]
    team.path.write_bytes(
        change_metadata(team.path.read_bytes(), lambda meta: meta.update(signatures=many))
    )
    assert "unreadable" in team.told()
    with pytest.raises(ValueError, match="in order"):
        parse_signatures(list(reversed(many[:3])))


# Revocation
# --------------------------------------------------------------------------------------------------------------------


def test_a_revoked_entry_is_not_used_wherever_it_lies(team: Team, tmp_path: Path) -> None:
    rules = team.rules(revoked=write_revocations(tmp_path / "revoked.toml", entry=team.digest))
    assert "revoked: found wrong" in team.told(rules)
    own_cache = LocalCache(team.shared.root, rules=rules)
    miss = own_cache.get(KEY, HERE, CONTRACT)
    assert isinstance(miss, Refusal)
    assert "revoked: found wrong" in miss.reason
    assert [failed.reason for failed in own_cache.sign(make_signer(tmp_path, "x")).failed] == [
        "revoked: found wrong"
    ]


def test_a_revoked_program_is_not_used_under_another_digest_or_inside_another_program(
    tmp_path: Path,
) -> None:
    entry = make_entry()
    nested = entry.choice.program.steps[1].program  # type: ignore[union-attr]
    for digest in (entry.choice.program.digest, nested.digest):
        rules = Rules(revoked=write_revocations(tmp_path / "revoked.toml", program=digest))
        cache = LocalCache(tmp_path / "own", rules=rules)
        cache.put(make_entry(package="judged here again"))
        assert isinstance(cache.get(KEY, HERE, CONTRACT), Refusal)
        assert cache.check_revoked(entry.choice.program) == Refusal("found wrong")
    assert LocalCache(tmp_path / "own").check_revoked(entry.choice.program) is None


def test_a_list_that_changes_holds_at_the_next_look_up(team: Team, tmp_path: Path) -> None:
    revoked = write_revocations(tmp_path / "revoked.toml")
    machine = team.machine(team.rules(revoked=revoked))
    assert isinstance(machine.get(KEY, HERE, CONTRACT), Hit)
    lists.append_revocation(revoked, "entry", team.digest, 'wrong for "NaN"\n\x7f')
    miss = machine.get(KEY, HERE, CONTRACT)
    assert isinstance(miss, Refusal)
    assert 'wrong for "NaN"\n\x7f' in miss.reason
    write_revocations(revoked)
    assert isinstance(machine.get(KEY, HERE, CONTRACT), Hit)


# Lists that cannot be used
# -----------------------------------------------------------------------------------------------------

GOOD = '[[publisher]]\nname = "a"\nkey = "ed25519:' + "ab" * 32 + '"\n'
DAMAGED = {
    "no TOML": (GOOD + "[[publisher\n", "line 4: no TOML"),
    "cut off": (GOOD[:-10], "line 3: no TOML"),
    "a short key": (GOOD + GOOD.replace("abab", "ab"), "line 4: the key of 'a'"),
    "no name": (GOOD + "\n[[publisher]]\nkey = 3\n", "line 5: name is None"),
    "an empty name": (GOOD.replace('"a"', '" "'), "line 1: name is ' '"),
    "a key twice": (
        GOOD + GOOD.replace('"a"', '"b"'),
        "line 4: the key of 'b' is already that of 'a'",
    ),
    "an unknown word": (GOOD + 'expires = "never"\n', "line 1: 'expires' is not known here"),
    "an unknown table": (GOOD + "[other]\n", "line 4: 'other' is not known here"),
    "no list": ('publisher = "team"\n', "line 1: 'publisher' is no list"),
    "not UTF-8": (GOOD.encode() + b"# \xff\n", "line 4: not UTF-8"),
    "the other list": (
        '[[revoked]]\nentry = "' + "ab" * 32 + '"\nreason = "x"\n',
        "line 1: 'revoked' is not known here",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_list_of_publishers_refuses_and_says_which_line(team: Team, name: str) -> None:
    content, reason = DAMAGED[name]
    path = team.folder / "publishers.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert f"{path}: {reason}" in team.told()
    assert isinstance(team.machine().get(KEY, HERE, CONTRACT), Refusal), "not even to be judged"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('[[revoked]]\nreason = "x"\n', "line 1: 0 of entry, program, key"),
        ('[[revoked]]\nentry = "12"\nreason = "x"\n', "line 1: entry: '12' is no digest"),
        (f'[[revoked]]\nkey = "{"ab" * 32}"\nreason = "x"\n', "line 1: key: "),
        (f'\n[[revoked]]\nentry = "{"ab" * 32}"\n', "line 2: reason is None"),
        (GOOD, "line 1: 'publisher' is not known here"),
        ("reason = ", "line 1: no TOML"),
    ],
)
def test_a_damaged_revocation_list_refuses_everything_the_own_cache_too(
    team: Team, content: str, reason: str
) -> None:
    revoked = team.folder / "revoked.toml"
    revoked.write_text(content)
    rules = team.rules(revoked=revoked)
    assert f"{revoked}: {reason}" in team.told(rules)
    assert isinstance(LocalCache(team.shared.root, rules=rules).get(KEY, HERE, CONTRACT), Refusal)
    with pytest.raises(SettingError, match=r"revoked\.toml"):
        lists.append_revocation(revoked, "entry", "ab" * 32, "x")
    assert revoked.read_text() == content


def test_a_list_that_is_gone_is_no_empty_list(team: Team) -> None:
    (team.folder / "publishers.toml").unlink()
    assert "FileNotFoundError" in team.told()
    rules = Rules(revoked=team.folder / "revoked.toml")
    assert isinstance(LocalCache(team.shared.root, rules=rules).get(KEY, HERE, CONTRACT), Refusal)


def test_a_list_that_everybody_may_write_is_refused(team: Team) -> None:
    path = team.folder / "publishers.toml"
    path.chmod(0o666)
    assert "everybody may write it" in team.told()
    path.chmod(0o664)
    assert isinstance(team.machine().get(KEY, HERE, CONTRACT), Hit)


def test_a_list_that_everybody_may_replace_is_refused(team: Team) -> None:
    team.folder.chmod(0o777)
    assert "everybody may replace it" in team.told()
    team.folder.chmod(0o1777)  # as /tmp: only the owner may replace it
    assert isinstance(team.machine().get(KEY, HERE, CONTRACT), Hit)


def test_a_linked_list_is_followed_told_and_held_to_the_same_rules(
    team: Team, caplog: pytest.LogCaptureFixture
) -> None:
    real = (team.folder / "publishers.toml").rename(team.folder / "real.toml")
    (team.folder / "publishers.toml").symlink_to(real)
    with caplog.at_level(logging.WARNING, "torch_cudal1"):
        for _ in range(2):
            assert isinstance(team.machine().get(KEY, HERE, CONTRACT), Hit)
    assert [record.getMessage().count("symbolic link") for record in caplog.records] == [1]
    real.chmod(0o666)
    assert "everybody may write it" in team.told()
    real.chmod(0o600)
    allow(real, other=team.signer.public.replace("ed25519:", "ed25519:00")[:72])
    assert "not on the list" in team.told()


def test_a_link_of_another_user_is_refused(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    real = (team.folder / "publishers.toml").rename(team.folder / "real.toml")
    (team.folder / "publishers.toml").symlink_to(real)
    owner = os.lstat(team.folder / "publishers.toml").st_uid
    lstat = os.lstat

    def foreign(path: Any) -> os.stat_result:
        status = lstat(path)
        return os.stat_result(
            (*status[:4], owner + 4711, *status[5:10]), {"st_mtime_ns": 0, "st_ctime_ns": 0}
        )

    monkeypatch.setattr(lists.os, "lstat", foreign)
    assert "a symbolic link made by user" in team.told()


def test_a_pipe_in_the_place_of_a_list_does_not_block(team: Team) -> None:
    path = team.folder / "publishers.toml"
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in team.told()


# Decision records
# -----------------------------------------------------------------------------------------------------------------------


def test_a_decision_record_from_elsewhere_needs_a_signature_over_itself(team: Team) -> None:
    team.shared.put_decision_record(NAME, {"runs": "inductor+graph"}, HERE, CONTRACT)
    machine, path = team.machine(), record_path(team.shared.root, NAME, HERE, CONTRACT)
    unsigned = machine.get_decision_record(NAME, HERE, CONTRACT)
    assert isinstance(unsigned, Refusal)
    assert "nobody signed it" in unsigned.reason
    assert team.shared.sign(team.signer).files == (path,)
    assert machine.get_decision_record(NAME, HERE, CONTRACT) == {"runs": "inductor+graph"}
    signed = path.read_text()
    team.shared.put_decision_record(NAME, {"runs": "eager"}, HERE, CONTRACT)
    body = path.read_text().rstrip("}")
    path.write_text(body + ', "signatures"' + signed.split(', "signatures"')[1])
    forged = machine.get_decision_record(NAME, HERE, CONTRACT)
    assert isinstance(forged, Refusal)
    assert "does not fit" in forged.reason
    path.write_text(signed)
    revoked = write_revocations(team.folder / "revoked.toml", key=team.signer.public)
    assert isinstance(
        team.machine(team.rules(revoked=revoked)).get_decision_record(NAME, HERE, CONTRACT), Refusal
    )


# Keys
# --------------------------------------------------------------------------------------------------------------------------


def test_a_private_key_is_the_owner_s_alone_whatever_the_umask_and_is_never_overwritten(
    tmp_path: Path,
) -> None:
    before = os.umask(0)
    try:
        create_key("team", tmp_path / "keys" / "team.pem", keep_out_of=())
    finally:
        os.umask(before)
    path = tmp_path / "keys" / "team.pem"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    key_bytes = path.read_bytes()
    with pytest.raises(SettingError, match="never overwritten"):
        create_key("team", path, keep_out_of=())
    assert path.read_bytes() == key_bytes
    (tmp_path / "link.pem").symlink_to(tmp_path / "elsewhere.pem")
    with pytest.raises(SettingError, match="never overwritten"):
        create_key("team", tmp_path / "link.pem", keep_out_of=())


def test_a_private_key_is_kept_out_of_caches_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    for path in (
        tmp_path / "cache" / "a.pem",
        tmp_path / "link" / "a.pem",
        tmp_path / "x" / ".." / "cache" / "a.pem",
    ):
        with pytest.raises(SettingError, match="outside the cache"):
            create_key("team", path, keep_out_of=(tmp_path / "cache",))
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("name", ["", "../up", "a/b", "a b", 'a"b', "a\nb", "x" * 65])
def test_a_name_that_is_no_plain_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingError, match="NAME"):
        create_key(name, tmp_path / "a.pem", keep_out_of=())


def test_a_key_that_others_may_read_or_that_is_none_does_not_sign(tmp_path: Path) -> None:
    create_key("team", path := tmp_path / "team.pem", keep_out_of=())
    path.chmod(0o640)
    with pytest.raises(SettingError, match="chmod 600"):
        load_signer(path, keep_out_of=())
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(SettingError, match="PKCS #8"):
        load_signer(path, keep_out_of=())
    with pytest.raises(SettingError, match="FileNotFoundError"):
        load_signer(tmp_path / "none.pem", keep_out_of=())


def test_the_settings_name_the_rules(tmp_path: Path) -> None:
    settings = Settings.from_env(
        {
            "TORCH_CUDAL1_TRUST": "signed",
            "TORCH_CUDAL1_PUBLISHERS": str(tmp_path),
            "TORCH_CUDAL1_REVOKED": "",
        }
    )
    assert Rules.of(settings) == Rules("signed", tmp_path, None)
    with pytest.raises(SettingError, match="trust"):
        Settings(trust="everybody")  # type: ignore[arg-type]
