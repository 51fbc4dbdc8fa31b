"""The tests that are marked gpu.

Only the files that have one are collected: the others import packages that need not be here.
"""

import argparse

import pytest

from examples.benchmarks.gpu.results import REPOSITORY, Line, measure, parse, parser_of


class Counter:
    """Counts how tests end."""

    def __init__(self) -> None:
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.failures: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Called by pytest for every file."""
        if report.failed:
            self.failures.append(f"{report.nodeid}: {str(report.longrepr)[-300:]}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest after every part of a test."""
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            self.failures.append(f"{report.nodeid}: {str(report.longrepr)[-300:]}")


def run(arguments: argparse.Namespace) -> Line:
    """Run them in this process; a failed test is a result, not an error."""
    tests = REPOSITORY / "tests"
    files = [path for path in tests.rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8")]
    counter = Counter()
    flags = ["-m", "gpu", "-q", "-W", "default", "-p", "no:cacheprovider", "--rootdir", REPOSITORY]
    flags += ["--continue-on-collection-errors"]
    pytest.main([*map(str, [*flags, *sorted(files)])], plugins=[counter])
    if not sum(counter.counts.values()):
        raise SystemExit(f"no test was run: {counter.failures}")
    return {**counter.counts, "failures": counter.failures}


def main(argv: list[str] | None = None) -> None:
    """Run the stage."""
    arguments = parse(parser_of(__doc__), argv)
    measure(arguments, "run_tests", {}, lambda: run(arguments))


if __name__ == "__main__":
    main()
