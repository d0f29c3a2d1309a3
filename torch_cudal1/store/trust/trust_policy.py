"""Who vouches for a record of a cache: decided at every load, returned as a value with its reason.
No network is needed.

    where it lies                                 who vouches
    the user's own writable cache                 this user: it was judged here, or copied there
    the folder shipped with the package           the user who installed the package
    anywhere else (read-only folders, Hub, ...)   a publisher on the list whose signature verifies; else no one

The revocation list comes first, and holds for the own cache too. A record that no one vouches for
is not run: where a search is allowed it is validated first, else refused. A publisher's signature
replaces validation: an entry that a publisher signed without validating it is believed. A
list takes effect at the next look-up; what a process runs already stays until it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.program import Call, Program
from torch_cudal1.store.trust.lists import (
    Publishers,
    Revocations,
    read_publishers,
    read_revocations,
)
from torch_cudal1.store.trust.signatures import KEY_PREFIX, Kind, Signature, verify

__all__ = [
    "OWN",
    "SHIPPED",
    "Forbidden",
    "Origin",
    "Rules",
    "SignedContent",
    "Standing",
    "Unvouched",
    "Vouched",
    "check_revoked_program",
    "decide_standing",
    "find_list_problems",
    "shorten_key",
]

Origin: TypeAlias = Literal["own", "shipped", "elsewhere"]
OWN = "this cache"
_PACKAGE = Path(__file__).resolve().parents[2]
_IN_WHEEL, _IN_CHECKOUT = _PACKAGE / "kernels_cache", _PACKAGE.parent / "kernels_cache"
# The folder beside the package counts only in a checkout: in site-packages it would belong to
# another distribution.
SHIPPED = _IN_CHECKOUT if (_PACKAGE.parent / "pyproject.toml").is_file() else _IN_WHEEL


@dataclass(frozen=True)
class Rules:
    """The rules for records from elsewhere; `Settings` describes the three fields."""

    policy: Literal["judge", "signed"] = "judge"
    publishers: Path | None = None
    revoked: Path | None = None

    @classmethod
    def of(cls, settings: Settings) -> Rules:
        """The rules that the settings name."""
        return cls(settings.trust, settings.publishers, settings.revoked)


@dataclass(frozen=True)
class SignedContent:
    """What a vouching is about: a record's kind, digest and signatures; `program` of an entry, None
    of a decision record.
    """

    kind: Kind
    digest: str
    signatures: tuple[Signature, ...] = ()
    program: Program | None = None


@dataclass(frozen=True)
class Vouched:
    """It may be used; `by` is "this cache", "torch-cudal1" or "publisher 'name'"."""

    by: str


@dataclass(frozen=True)
class Unvouched(Refusal):
    """No trusted key signed it: validated here before it is used, or refused, by policy."""


@dataclass(frozen=True)
class Forbidden(Refusal):
    """Not to be used at all: revoked, or a list that would say so cannot be read."""


Standing: TypeAlias = Vouched | Unvouched | Forbidden


def decide_standing(record: SignedContent, origin: Origin, rules: Rules) -> Standing:
    """Who vouches for a whole record found at `origin`. Digest and path were checked before."""
    revoked = read_revocations(rules.revoked)
    if isinstance(revoked, Refusal):
        # A list that cannot be read may hold this very record, so everything is refused.
        return Forbidden(f"the revocation list cannot be used: {revoked.reason}")
    if revocation := _find_revocation(record, revoked):
        return Forbidden(f"revoked: {revocation}")
    # After the revocations, which hold for the own cache too.
    if origin != "elsewhere":
        return Vouched(OWN if origin == "own" else "torch-cudal1")
    publishers = read_publishers(rules.publishers)
    if isinstance(publishers, Refusal):
        return Forbidden(f"the list of publishers cannot be used: {publishers.reason}")
    return _check_signatures(record, publishers, revoked)


def check_revoked_program(program: Program, rules: Rules) -> Refusal | None:
    """Why a Program, or one nested in it, is not to be used, wherever it comes from."""
    revoked = read_revocations(rules.revoked)
    if isinstance(revoked, Refusal):
        return Refusal(f"the revocation list cannot be used: {revoked}")
    return _find_revoked_program(program, revoked)


def find_list_problems(rules: Rules) -> tuple[str, ...]:
    """What is wrong with the lists, for reports before a record is loaded."""
    lists = (read_publishers(rules.publishers), read_revocations(rules.revoked))
    return tuple(read_list.reason for read_list in lists if isinstance(read_list, Refusal))


def _check_signatures(
    record: SignedContent, publishers: Publishers, revoked: Revocations
) -> Standing:
    """One good signature is enough; without one, a revoked key refuses, and everything else leaves
    it unvouched.
    """
    if not record.signatures:
        return Unvouched("nobody signed it")
    reasons: list[str] = []
    by_revoked = ""
    for signature in record.signatures:
        name = publishers.names.get(signature.key)
        # Before the list of publishers: a revoked key counts for nothing, although it may still be
        # listed.
        if (reason := revoked.key.get(signature.key)) is not None:
            by_revoked = f"signed with the revoked key {shorten_key(signature.key)}: {reason}"
        elif name is None:
            reasons.append(
                f"signed with {shorten_key(signature.key)}, which is not on the list of publishers"
            )
        elif (problem := verify(signature, record.kind, record.digest)) is not None:
            # Only signatures of listed keys are verified: a file may carry sixteen, and each costs
            # time.
            reasons.append(f"signed as publisher {name!r}: {problem.reason}")
        else:
            return Vouched(f"publisher {name!r}")
    # A record whose only good signature is by a revoked key is refused, not judged, by any policy.
    return Forbidden(by_revoked) if by_revoked else Unvouched("; ".join(reasons))


def _find_revocation(record: SignedContent, revoked: Revocations) -> Refusal | None:
    if (reason := revoked.entry.get(record.digest)) is not None:
        return Refusal(reason)
    return _find_revoked_program(record.program, revoked) if record.program is not None else None


def _find_revoked_program(program: Program, revoked: Revocations) -> Refusal | None:
    # Digests of Programs cost hashing their payloads.
    if not revoked.program:
        return None
    reasons = (revoked.program.get(digest) for digest in _iter_digests(program))
    return next((Refusal(reason) for reason in reasons if reason), None)


def _iter_digests(program: Program) -> Iterator[str]:
    yield program.digest
    # A revoked Program must not run inside another one either.
    for step in program.steps:
        if isinstance(step, Call):
            yield from _iter_digests(step.program)


def shorten_key(key: str) -> str:
    """A public key for people: its first digits."""
    return f"{key[: len(KEY_PREFIX) + 12]}…"
