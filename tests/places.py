"""Paths of the repository: tests are in folders at different depths."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
