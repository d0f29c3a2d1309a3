"""A pytest plugin: each failure is printed when it happens, with the slowest tests so far.
`python -m pytest -p tests.report_now`.

For runs under a time limit: pytest tells of failures at its end, so a run that is cut says nothing.
Under xdist the controller prints, as results come in. What a test that hangs is doing it does not
know.
"""

from __future__ import annotations

import heapq

import pytest

__all__ = ["pytest_configure"]

_LINES = 25  # of a traceback, the last ones: there stands what went wrong
_SLOWEST = 15


def pytest_configure(config: pytest.Config) -> None:
    """Print where results come together: in the only process, or in the controller of several."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_ReportNow(config), "report-now")


class _ReportNow:
    """Keeps how long each test took; prints through pytest's own terminal, which no test captures."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self._tell(
                f"{'FAILED' if report.when == 'call' else f'ERROR at {report.when} of'} {report.nodeid}",
                report,
            )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tell(f"ERROR collecting {report.nodeid}", report)

    def pytest_terminal_summary(self) -> None:
        self._print(self._slowest())

    def _tell(self, title: str, report: pytest.TestReport | pytest.CollectReport) -> None:
        self._print([title, *report.longreprtext.splitlines()[-_LINES:], *self._slowest()])

    def _slowest(self) -> list[str]:
        slowest = heapq.nlargest(_SLOWEST, self._seconds.items(), key=lambda item: item[1])
        title = f"slowest of {len(self._seconds)} so far, set-up and tear-down included:"
        return [title, *(f"  {seconds:7.2f} s {name}" for name, seconds in slowest)]

    def _print(self, lines: list[str]) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.write("\n".join(["", *lines, ""]), flush=True)  # it stands in a row of dots
