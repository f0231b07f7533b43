"""The tests of aiodlock."""
