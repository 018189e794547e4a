"""A cluster that is not there: runs a training job under faults with rerail's own diagnosis, decisions and plans, and a clock of its own.

Read in this order: `scenario` (what is assumed, and by whom), `kinds` and `faults` (what breaks, and when), `cluster` (where), `training`
(how far the job is, and what is saved), `desk` (what is made of a fault), `job` (the flow of one run), `run` and `sweep` (many of them).
"""
