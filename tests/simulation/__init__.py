"""Whole clients of aiodlock on a virtual clock, replayable by seed."""
