"""The lines above a table name file, machine and command; a speed-up shows its interval."""

from __future__ import annotations

from benchmarks.subject_tables.table_text import format_interval, make_heading
from tests.benchmarks.subject_tables.documents import CPU_MACHINE, make_document


def test_a_heading_names_the_file_the_machine_and_the_command() -> None:
    first, second, empty = make_heading("cpu-x.json", make_document([]))
    assert first == (
        "`benchmarks/results/cpu-x.json`: 4 cores of a CPU, torch 2.11, Triton 3.6, Python 3.12."
    )
    assert (second, empty) == ("Made by `python -m it`.", "")


def test_of_a_gpu_the_heading_has_the_driver() -> None:
    gpu = {**CPU_MACHINE, "gpu": "NVIDIA H200", "gpu_state": {"driver_version": "580.1"}}
    heading = make_heading("h200-x.json", make_document([], environment=gpu))
    assert "NVIDIA H200, driver 580.1, torch" in heading[0]


def test_a_ratio_that_was_not_measured_is_an_empty_cell() -> None:
    assert format_interval({"speedup": 1.5, "low": 1.25, "high": 2.0}) == "1.500x [1.250, 2.000]"
    assert format_interval(None) == ""
