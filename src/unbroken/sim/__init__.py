"""A simulated world for the machines of operator and agent: seeded time, chance and faults.

`World(seed)` holds a job, its pods and nodes, an API server, links that lose and delay, and worker
processes; the real machines of `core` decide.  `run(seed)` lets faults happen, heals the world and
demands that the job ends as it should; checkers that know the truth raise `Violation`.
"""
