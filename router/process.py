"""What a process that carries thousands of streams does to itself before it begins."""

from __future__ import annotations

import gc
import resource

#: Objects allocated between two young collections; streams allocate a lot and keep little.
GC_THRESHOLD = 10_000


def raise_descriptor_limit() -> None:
    """Two descriptors a stream: the usual soft limit of 1024 would end at 500 streams."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def calm_collector() -> None:
    """Collect seldom, and never again look at what is there already; once all is imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])
