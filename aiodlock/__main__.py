"""Lets `python -m aiodlock` do what the command `aiodlock` does."""

import sys

from aiodlock.cli import main

if __name__ == "__main__":
    sys.exit(main())
