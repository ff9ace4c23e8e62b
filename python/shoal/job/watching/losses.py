"""What the ranks of a job lose their time to: waiting for data, for late ranks, for communication. Computed from the numbers that
metrics.py keeps.

    found = losses_of(reader)         shares of a rank's time; they sum to at most 1
    change(reader, found)             the one change that would gain most, as a sentence

The shares are means over the ranks and the job. Input is what loaders counted; how much of the blocked time is
due to late ranks is estimated."""
from __future__ import annotations

import math
import statistics
from typing import Dict, List, NamedTuple, Optional

from shoal.job.watching.metrics import Reader

LEAST = 0.05  # of the time: a smaller loss is not worth a change
RECENT = 10  # samples

INPUT, LATE, COMMUNICATION, IDLE, COMPUTING = "waiting for data", "late ranks", "communication", "idle", "computing"


class Loss(NamedTuple):
    what: str
    share: float
    means: str  # what is counted


class RankMeans(NamedTuple):
    rank: int
    host: str
    mean: Dict[str, float]


def _ranks(reader: Reader) -> List[RankMeans]:
    """Returns the means of each rank that has been in Shoal."""
    found: Dict[int, RankMeans] = {}
    for (name, host, rank), series in reader.series.items():
        mean = series.mean()
        if rank is not None and name.startswith("shoal/") and math.isfinite(mean):
            found.setdefault(rank, RankMeans(rank, host, {})).mean[name] = mean
    return [found[rank] for rank in sorted(found) if "shoal/exposed" in found[rank].mean]


def _mean(ranks: List[RankMeans], name: str) -> float:
    return statistics.mean(rank.mean.get(name, 0.0) for rank in ranks)


def late_share(ranks: List[RankMeans]) -> float:
    """Estimates the share of the time for which a rank waits for later ones, as a mean over all ranks. The larger of two: what
    ranks are blocked longer than the one that is blocked least, which is the one that comes last; and by how much the last rank of
    a step is late, while all others wait. Operations of a step overlap, so a step counts once if steps are known."""
    exposed = [rank.mean["shoal/exposed"] for rank in ranks]
    late = sum(rank.mean.get("shoal/steps_per_s", rank.mean.get("shoal/operations_per_s", 0.0)) *
               rank.mean.get("shoal/came_last", 0.0) * rank.mean.get("shoal/late_s", 0.0) for rank in ranks)
    return max(statistics.mean(exposed) - min(exposed), late * (len(ranks) - 1) / len(ranks))


def losses_of(reader: Reader) -> List[Loss]:
    """Returns the losses, the largest first, then the rest. Empty if no rank has been in Shoal."""
    ranks = _ranks(reader)
    if not ranks:
        return []
    exposed = min(_mean(ranks, "shoal/exposed"), 1.0)
    waits = min(_mean(ranks, "shoal/input"), 1.0 - exposed)
    late = min(late_share(ranks), exposed)
    idle = min(_mean(ranks, "shoal/idle"), 1.0 - exposed - waits)
    lost = [Loss(INPUT, waits, "in next() of a DataLoader or a tf.data iterator"),
            Loss(LATE, late, "blocked in Shoal until the last rank had called; estimated"),
            Loss(COMMUNICATION, exposed - late, "blocked in Shoal while all ranks were there")]
    lost.sort(key=lambda loss: -loss.share)
    return lost + [Loss(IDLE, idle, "on no core and not in Shoal: a GPU computes, or the rank waits for something that Shoal does not see"),
                   Loss(COMPUTING, max(1.0 - exposed - waits - idle, 0.0), "everything else")]


def change(reader: Reader, found: List[Loss]) -> str:
    """Names the one change that would gain most. Empty without losses."""
    if not found:
        return ""
    first = found[0]
    if first.share < LEAST:
        return f"No change of input or communication would gain more than {100 * LEAST:.0f} % of the time."
    gain = f"would gain up to {100 * first.share:.0f} % of the time ({_speed(first.share)} the speed)"
    if first.what == INPUT:
        return f"Faster input {gain}: more workers of the loader, larger files, data on this machine; `shoal doctor --data` measures the storage."
    if first.what == LATE:
        last = max(_ranks(reader), key=lambda rank: rank.mean.get("shoal/came_last", 0.0))
        share = last.mean.get("shoal/came_last", 0.0)
        return (f"Ranks that come at the same time {gain}: rank {last.rank} on {last.host} came last in {100 * share:.0f} % of the operations; "
                "compare its data, its cores and its host with the others'.")
    return (f"Cheaper communication {gain}: more samples for each rank in a step, gradients summed during the backward pass, compression "
            "between hosts, or a faster network; `shoal sim step` predicts each.")


def _speed(share: float) -> str:
    return f"{1 / (1 - share):.2g} times" if share < 0.99 else "many times"


def input_text(reader: Reader) -> Optional[str]:
    """Returns "ranks wait for data 31 % of the time", from the newest samples; None if that is rare or no loader is seen."""
    recent = [value for series in reader.of("shoal/input").values() for value in series.recent(RECENT)]
    if not recent or statistics.mean(recent) < LEAST:
        return None
    return f"ranks wait for data {100 * statistics.mean(recent):.0f} % of the time"
