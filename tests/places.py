"""Where things lie: tests stand in rooms at different depths."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
