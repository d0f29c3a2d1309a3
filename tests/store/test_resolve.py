"""Sources are asked in order, once each, and every no is kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.store.conftest import CONTRACT, HERE, make_entry, program
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.records import Contract, Region, Target
from torch_cudal1.store.cache.resolve import Hit, Source, SourceMiss, resolve

REGION = Region(program(), ("input",))


@dataclass
class Fake:
    """A source with a prepared answer that counts how often it was asked."""

    name: str
    answer: Hit | Refusal
    lookups: list[tuple[str, Target, Contract]] = field(default_factory=list)

    def find(self, region: Region, target: Target, contract: Contract) -> Hit | Refusal:
        self.lookups.append((region.key, target, contract))
        return self.answer


def test_the_first_hit_wins_and_later_sources_are_not_asked() -> None:
    hit = Hit(make_entry(), "second")
    sources = [
        Fake("one", Refusal("absent")),
        Fake("two", hit),
        Fake("three", Hit(make_entry(), "third")),
    ]
    resolution = resolve(REGION, sources, HERE, CONTRACT)
    assert resolution.hit is hit
    assert resolution.misses == (SourceMiss("one", "absent"),)
    assert [len(source.lookups) for source in sources] == [1, 1, 0]
    assert sources[0].lookups == [(REGION.key, HERE, CONTRACT)]


def test_a_hit_that_needs_no_judging_is_preferred_to_one_that_does() -> None:
    stale, fresh = Hit(make_entry(), "cache", "judged elsewhere"), Hit(make_entry(), "hub")
    assert resolve(REGION, [Fake("cache", stale), Fake("hub", fresh)], HERE, CONTRACT).hit is fresh
    resolution = resolve(
        REGION,
        [Fake("cache", stale), Fake("hub", Refusal("offline")), Fake("more", Refusal("absent"))],
        HERE,
        CONTRACT,
    )
    assert resolution.hit is stale
    assert resolution.trouble == "hub: offline"


def test_one_that_somebody_vouches_for_is_preferred_to_an_earlier_one_that_nobody_does() -> None:
    unvouched, vouched = (
        Hit(make_entry(), "one", "nobody signed it"),
        Hit(make_entry(), "two", None, "publisher 'team'"),
    )
    assert (
        resolve(REGION, [Fake("one", unvouched), Fake("two", vouched)], HERE, CONTRACT).hit
        is vouched
    )
    resolution = resolve(
        REGION, [Fake("one", unvouched), Fake("two", Refusal("absent"))], HERE, CONTRACT
    )
    assert resolution.hit is unvouched
    assert resolution.misses == (SourceMiss("two", "absent"),)


def test_all_reasons_are_kept_when_nobody_knows() -> None:
    sources: list[Source] = [
        Fake("cache", Refusal("unreadable: x")),
        Fake("hub", Refusal("offline")),
    ]
    resolution = resolve(REGION, sources, HERE, CONTRACT)
    assert resolution.hit is None
    assert resolution.misses == (SourceMiss("cache", "unreadable: x"), SourceMiss("hub", "offline"))


def test_no_source_is_no_hit() -> None:
    assert resolve(REGION, [], HERE, CONTRACT).misses == ()
