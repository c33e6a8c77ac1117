"""Seeds of worlds that once failed, and what was wrong with the machines then.

They say what they say only as long as `testing.scenario` draws the same world for them.
"""

from __future__ import annotations

SEEDS = {
    85: "a new pod waited for ever for the only free node, which it had been told to avoid",
    338: "the death of a node, heard of second, was not blamed for what its peers complained of",
    233: "one request to restart was followed again by the next operator",
    1306: "the same, after another restart",
    2094: "a pod was force-deleted on a node that had come back",
    100: "a pod that found no place was not made anew",
    2380: "a deadline stayed in the past, and the operator went round in circles",
    1463: "a new attempt got an address that was in use before",
    72: "the next operator gave an address a second time",
    156: "a pod was taken for dead that was put on its node after the fence",
    31: "the clock of an agent put the first progress before the start",
    146: "an agent that came back in its pod at once was waited for",
    840: "an agent that came back in its pod at once was not blamed",
    450: "a job suspended while it was adopted kept its operator spinning",
    2009: "an agent heard of late lost its rank",
    1728: "an agent did not know the end of a worker that had just left the barrier",
    886: "a worker at the barrier of a lost pod was counted as one of its rank",
    323: "a job that had ended was taken for silent by what its agents had said of it last",
    2902: "a new operator gave a rank to another pod, which was ready only after the first start",
    286: "an operator that came late to a job that was complete did not read its receipts",
    1683: "an operator that heard no agent of an attempt thought that there had been none",
    1278: "an agent that was started again was sent a copy, and nobody asked it",
}
