"""Which rank of a worker a leg goes to, where a worker is several engines behind one address.

Pure. Load is the number of live legs on a rank, read from the legs themselves.
"""

from __future__ import annotations

from collections import Counter

from router.worker import Worker


def least_loaded(worker: Worker) -> int | None:
    """The rank with the fewest live legs, the first among equals; None for a single rank."""
    if worker.dp_size == 1:
        return None
    loads = Counter(getattr(leg, "rank", None) for leg in worker.legs)
    return min(range(worker.dp_size), key=lambda rank: loads[rank])
