"""The best interval between checkpoints on disk, and the next due step; values in, values out."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

INTERVAL_SECONDS_MIN, INTERVAL_SECONDS_MAX = 60.0, 4 * 3600.0
WORKER_SECONDS_PER_FAILURE = 54 * 16_384 / 419 * 86_400
"""Prior for the time between failures of one worker, in seconds.

Llama 3 405B lost 419 times to unexpected interruptions in 54 days on 16,384 GPUs, one in 2,111
GPU-days ("The Llama 3 Herd of Models", 2024, section 3.3.4).
"""


@dataclass(frozen=True)
class Advice:
    """Advice on the interval between saves; everything in seconds but `expected_loss`."""

    interval_seconds: float
    """Seconds from the start of one save to the start of the next."""
    cost_seconds: float
    """Seconds that a save makes training wait, on the slowest rank in the last save."""
    write_seconds: float
    """Seconds until the checkpoint is complete and verified; training continues meanwhile."""
    mtbf_seconds: float
    """Mean time between failures of the whole job, in seconds."""
    expected_loss: float
    """Share of the time that is spent on saving and on repeated steps, without restarts."""

    def __str__(self) -> str:
        return (
            f"a checkpoint every {self.interval_seconds:.0f} s (it costs {self.cost_seconds:.3g} s"
            f" and is complete after {self.write_seconds:.3g} s; one failure in"
            f" {self.mtbf_seconds / 3600:.3g} h; {self.expected_loss:.2%} of the time is lost)"
        )


def mtbf_seconds(workers: int, failures: int, elapsed_seconds: float) -> float:
    """Return the mean time between failures, from the published rate and this job's own failures.

    It is the mean of the posterior of a rate whose prior is a gamma distribution worth one failure.
    The published rate counts until the job has failures of its own.
    """
    prior = WORKER_SECONDS_PER_FAILURE / max(1, workers)
    return (prior + max(0.0, elapsed_seconds)) / (1 + max(0, failures))


def optimal_seconds(cost: float, mtbf: float) -> float:
    """Return the time between checkpoints with the least loss.

    J. W. Young ("A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974)
    gives sqrt(2 cost mtbf). J. T. Daly ("A higher order estimate of the optimum checkpoint interval
    for restart dumps", FGCS 22(3), 2006, equation 37) gives, for cost < 2 mtbf,

        sqrt(2 cost mtbf) (1 + sqrt(cost / (2 mtbf)) / 3 + cost / (2 mtbf) / 9) - cost

    and mtbf beyond that: the work between two saves. From start to start it is longer by the cost.
    """
    if cost >= 2 * mtbf:
        return mtbf + cost
    ratio = cost / (2 * mtbf)
    return sqrt(2 * cost * mtbf) * (1 + sqrt(ratio) / 3 + ratio / 9)


def advise(cost: float, write: float, mtbf: float) -> Advice:
    """Return the interval within bounds; a save never begins before the last one is complete.

    The cost is the time that training waits. The time of writing, which training does not wait for,
    is a lower bound, and adds to the loss at a failure.
    """
    shortest = min(max(INTERVAL_SECONDS_MIN, write), INTERVAL_SECONDS_MAX)
    interval = min(max(optimal_seconds(cost, mtbf), shortest), INTERVAL_SECONDS_MAX)
    loss = cost / interval + (interval / 2 + write) / mtbf
    return Advice(interval, cost, write, mtbf, min(1.0, loss))


def has_changed(before: Advice | None, now: Advice) -> bool:
    """True if the interval has changed by more than 20 %, which is worth reporting."""
    if before is None:
        return True
    return abs(now.interval_seconds / before.interval_seconds - 1) > 0.2


def steps_to_wait(remaining_seconds: float, step_seconds: float) -> int:
    """Return the number of steps after which all ranks should look again; 0: a save is due now.

    It is half of the steps that seem left. So steps may become slower or quicker meanwhile, and the
    looks, which all ranks make together, stay few.
    """
    if remaining_seconds < step_seconds / 2 or remaining_seconds <= 0:
        return 0
    left = remaining_seconds / step_seconds if step_seconds > 0 else 1.0
    return max(1, int(min(left, 1e6) / 2))
