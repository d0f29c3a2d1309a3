"""No detector is dead: for each there is a cheat that nothing else catches, so with the detector switched off it would get in.

A case says so with `alone`, and `test_cases` puts it to every detector to see that it is true. Here the list is held against the
protocol. `python -m tests.adversarial.matrix` prints which cases could stand for which detector.
"""

from __future__ import annotations

from tests.adversarial.case import DETECTORS, FAMILIES, case_files

WITHOUT = {
    "triage": "it may refuse early, never alone",
    "roofline": "faster than the device can be means that something was left out, which timed outputs show; see test_roofline",
}
FILES = case_files()


def test_every_detector_has_a_case_that_nothing_else_catches() -> None:
    stood_for = {file.case.expected for file in FILES if file.case.alone}
    assert set(DETECTORS) - stood_for == set(WITHOUT)


def test_every_class_has_a_case_and_a_file_says_what_its_place_says() -> None:
    assert {file.case.number for file in FILES} == set(FAMILIES)
    assert len({file.id for file in FILES}) == len(FILES) >= 60


def test_every_form_is_there() -> None:
    assert {file.case.form for file in FILES} == {"source", "program", "runtime"}
