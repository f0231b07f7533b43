"""Runs many seeds, or one with its history, or the mutants."""

from __future__ import annotations

import sys

from tests.simulation.many import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
