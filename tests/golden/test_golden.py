"""The golden file holds: keys, decisions, entries and kernel texts of a fixed set of inputs are the
recorded ones.
"""

from __future__ import annotations

import json

import pytest

from tests.golden.record import GOLDEN, SECTIONS

ANEW = "a change that is meant to change this runs `python -m tests.golden.record`, and its commit says why"


@pytest.mark.parametrize("section", SECTIONS)
def test_what_is_decided_is_what_was_recorded(section: str) -> None:
    expected, actual = (
        json.loads(GOLDEN.read_text())[section],
        json.loads(json.dumps(SECTIONS[section]())),
    )
    if section == "cubins" and expected["compilers"] != actual["compilers"]:
        pytest.skip(f"recorded with {expected['compilers']}; here is {actual['compilers']}")
    differing = sorted(
        name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name)
    )
    assert not differing, f"{differing[:10]} of {len(expected)}; {ANEW}"
