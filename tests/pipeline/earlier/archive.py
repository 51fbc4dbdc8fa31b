"""The runs of an earlier version: tests/pipeline/test_earlier.py tells what they are."""

from pathlib import Path

ARCHIVE = Path(__file__).with_name("runs.tar.gz")
