"""Real processes on real servers that compete for one name while faults strike them.

`python -m tests.chaos --seed 7 --seconds 120` runs every plan. Read `plans`, `worker`, `verdict`.
"""
