from __future__ import annotations

import pytest

tables: list[str] = []
"""What is printed at the end."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if tables:
        terminalreporter.section("memory, descriptors and threads at rest")
        for table in tables:
            terminalreporter.write_line(table + "\n")
