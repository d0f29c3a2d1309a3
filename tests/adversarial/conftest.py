"""The option for nightly runs."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-profiles",
        action="store_true",
        help="judge every case at every profile that must catch it",
    )
