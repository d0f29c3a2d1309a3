"""The HTML page: it holds every number and reason, escapes every text, needs no network, and works
without matplotlib.
"""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from torch_cudal1.cli.view import page, plots
from torch_cudal1.cli.view.page import Story, render, winners
from torch_cudal1.core.report import OWN_FORWARD, EndToEnd, Explanation, Interval, RegionReport

ATTACKS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</title><script>",
    "'onload='x",
    "$\\frac{",
    "&lt;b&gt;",
]
MEASURED = EndToEnd(
    eager_us=820.0,
    inductor_us=900.0,
    ours_us=400.0,
    vs_eager=Interval(2.05, 1.98, 2.11),
    vs_inductor=Interval(2.25, 2.1, 2.4),
)


def region(**changes: object) -> RegionReport:
    facts: dict[str, object] = {
        "name": "forward",
        "key": "ab" * 32,
        "kind": "inference",
        "granularity": "whole",
        "runs": "diag_matmul -> eager",
        "origin": "builtin",
        "techniques": ("diag_matmul",),
        "speedup": 2.05,
        "low": 1.98,
        "high": 2.11,
        "baselines_us": {"eager": 820.0, "inductor": 900.0},
        "error_ratio": 0.97,
        "reason": "lower bound 1.98x",
        "tried": (
            {
                "label": "constant",
                "decision": "rejected",
                "reason": "a NaN input gives 0",
                "detector": "special",
                "error_ratio": None,
            },
        ),
    }
    return RegionReport(**(facts | changes))  # type: ignore[arg-type]


def story(target: str = "DiagMatmul", /, **changes: object) -> Story:
    explanation = Explanation(
        target=target,
        device="cpu",
        regions=(region(**changes),),
        left_out=("dropout in training mode",),
        end_to_end=MEASURED,
    )
    return Story(
        explanation=explanation, description="what it is", worst_error=1.2e-7, eager_error=2e-7
    )


class Tags(HTMLParser):
    """Collects start tags with attributes, ids, and whether tags are balanced."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.stack: list[str] = []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


def test_the_page_holds_the_numbers_the_reasons_and_the_environment() -> None:
    content = render("t", [story()], {"torch": "2.13.0"})
    for part in (
        "2.05x [1.98, 2.11]",
        "2.25x [2.10, 2.40]",
        "1.2e-07",
        "a NaN input gives 0",
        "special",
        "dropout in training mode",
        "lower bound 1.98x",
        "eager 820 us, inductor 900 us",
        "2.13.0",
        "what it is",
    ):
        assert part in content, part


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_text_from_outside_becomes_markup(attack: str) -> None:
    attempts = ({"label": attack, "decision": attack, "reason": attack, "detector": attack},)
    attacked = story(
        attack,
        name=attack,
        runs=attack,
        reason=attack,
        tried=attempts,
        techniques=(attack,),
        baselines_us={attack: 1.0},
    )
    content = render(attack, [attacked], {attack: attack}, intro=attack)
    tags = Tags(content)
    assert tags.stack == []
    names = {tag for tag, _ in tags.tags}
    assert not names & {"script", "img", "iframe", "link", "object"}
    assert not [key for _, attrs in tags.tags for key in attrs if key.startswith("on")]


def test_the_page_asks_the_network_for_nothing() -> None:
    content = render("t", [story()], {})
    links = [
        value
        for _, attrs in Tags(content).tags
        for key, value in attrs.items()
        if key in ("src", "href", "xlink:href")
    ]
    assert all(value is not None and value.startswith("#") for value in links)
    assert "url(http" not in content
    assert "@import" not in content


def test_ids_are_unique_and_links_lead_to_them() -> None:
    tags = Tags(render("t", [story("a b"), story("a-b"), story("ä")], {})).tags
    ids = [attrs["id"] for _, attrs in tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    targets = {attrs["href"] for tag, attrs in tags if tag == "a"}
    assert targets <= {f"#{name}" for name in ids}


def test_the_page_can_be_read_aloud_and_by_keyboard() -> None:
    tags = Tags(render("t", [story()], {})).tags
    assert ("html", {"lang": "en"}) in tags
    images = [attrs for tag, attrs in tags if tag == "svg"]
    assert images
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in images)
    assert sum(tag == "caption" for tag, _ in tags) == sum(tag == "table" for tag, _ in tags)
    assert all("scope" in attrs for tag, attrs in tags if tag == "th")


def test_without_matplotlib_the_page_says_why_there_are_no_plots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plots, "_MATPLOTLIB", False)
    content = render("t", [story()], {})
    assert "<svg" not in content
    assert "matplotlib is not installed" in content
    assert "2.05x [1.98, 2.11]" in content


def test_a_module_without_measurements_and_one_that_failed_are_shown_as_such() -> None:
    bare = Explanation(target="empty", device="cpu")
    content = render("t", [Story(explanation=bare, problem="it did not load")], {})
    assert "it did not load" in content
    assert "1.00x" not in content


def test_a_swap_that_was_taken_back_does_not_count_as_won() -> None:
    explanation = Explanation(
        target="t",
        device="cpu",
        regions=(region(), region()),
        end_to_end=MEASURED,
        undone="slower in place",
    )
    assert winners(explanation) == "eager runs: diag_matmul did not pay end to end"
    assert explanation.untouched
    assert "slower in place" in page.render("t", [Story(explanation=explanation)], {})


@pytest.mark.parametrize(
    ("regions", "shown"),
    [
        ((region(), region(), region(techniques=("fold_bn",))), "diag_matmul (2), fold_bn"),
        (
            (region(origin="baseline", runs="inductor", techniques=()),),
            "inductor runs: nothing beat it",
        ),
        (
            (region(origin="baseline", runs=OWN_FORWARD, techniques=()),),
            "eager runs: no stored decision",
        ),
        ((), "eager runs: left to PyTorch"),
    ],
)
def test_winners_are_named_with_their_number(regions: tuple[RegionReport, ...], shown: str) -> None:
    assert winners(Explanation(target="t", device="cpu", regions=regions)) == shown


def test_a_model_that_was_skipped_is_not_told_as_failed() -> None:
    content = render(
        "t",
        [Story(explanation=Explanation(target="m", device="cpu"), skipped="no time was left")],
        {},
    )
    assert "skipped: no time was left" in content
    assert "failed" not in content


def test_a_candidate_that_was_never_judged_is_neither_good_nor_bad() -> None:
    content = render(
        "t",
        [
            story(
                tried=({"label": "x", "decision": "not judged", "reason": "the budget was spent"},)
            )
        ],
        {},
    )
    assert '<span class="">not validated</span>' in content


def test_what_the_whole_call_gained_is_not_told_as_left_out() -> None:
    explanation = Explanation(
        target="m", device="cpu", regions=(region(),), gate=("end to end 1.3x",)
    )
    content = render("t", [Story(explanation=explanation)], {})
    assert "Measured before it was put in place: end to end 1.3x" in content
    assert "Left to PyTorch" not in content
