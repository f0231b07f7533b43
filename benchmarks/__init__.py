"""Measures aiodlock side by side with its peers: ``python -m benchmarks``.

Reading order: `_rows` (what is measured), `_run` (in which order), `worker` with `work/` (what one
process does), `clients/` (whose locks), `_trouble` (what befalls a server), `_reduce` (what is made
of it), `_gates` (what it is held against), `_report` with `_plots` (what people see).

A new client is a class in `clients/`, an entry in its catalogue, its name in some rows. A new kind
of work is a function in `work/`, another in `_reduce`, a row.
"""
