"""How much `bench tiers` moves, from what it is told."""

from __future__ import annotations

from tiered_kv.bench.content import Load
from tiered_kv.bench.disk_paths import SETS_ON_DISK, disk_bytes
from tiered_kv.bench.sampling import LEAST_SAMPLES, Amounts
from tiered_kv.bench.settings import TiersSettings
from tiered_kv.bench.statistics import LEAST_P99
from tiered_kv.storage.slab import align_up

SINGLE_BYTES = 1 << 20
"""What one put or get of a latency moves (at least one page)."""

_RATE_S, _SINGLE_S = 6.0, 4.0  # 5 page sizes, 7 paths: 6 minutes at most where it is not too slow
_SMOKE_RATE_S, _SMOKE_SINGLE_S = 2.0, 1.0


def page_sizes(settings: TiersSettings) -> list[int]:
    """Every page size once, in the order given."""
    return [int(size) for size in dict.fromkeys(settings.page_bytes)]


def transfer_bytes_of(settings: TiersSettings) -> int:
    """Bytes of one of the transfers that a sample consists of."""
    return min(int(settings.transfer_bytes), int(settings.set_bytes))


def amounts_of(settings: TiersSettings, page_bytes: int, set_bytes: int) -> Amounts:
    """How many pages, samples and seconds a page size is given."""
    transfer_pages = max(1, min(transfer_bytes_of(settings), set_bytes) // page_bytes)
    transfers = max(1, set_bytes // (transfer_pages * page_bytes))
    single_pages = min(max(1, SINGLE_BYTES // page_bytes), transfer_pages)
    return Amounts(
        full=Load(transfers, transfer_pages),
        single=Load(1, single_pages),
        repeats=settings.repeats,
        singles=3 if settings.smoke else LEAST_P99 + 1,
        rate_s=_SMOKE_RATE_S if settings.smoke else _RATE_S,
        single_s=_SMOKE_SINGLE_S if settings.smoke else _SINGLE_S,
        least=1 if settings.smoke else LEAST_SAMPLES,
    )


def needed_bytes(settings: TiersSettings, sizes: list[int]) -> int:
    """Free space on disk that the run needs: one page size's store and raw file."""
    if not any(path.startswith("disk") for path in settings.paths):
        return 0
    sets = [amounts_of(settings, size, int(settings.set_bytes)).full.pages for size in sizes]
    return max(
        disk_bytes(size, pages) + SETS_ON_DISK * pages * align_up(size)
        for size, pages in zip(sizes, sets, strict=True)
    )


def needed_memory_bytes(settings: TiersSettings, sizes: list[int]) -> int:
    """Memory that the run needs: one page size's HBM, host and limit, two sets each."""
    sets = (
        max(amounts.full.pages, amounts.single.pages) * align_up(size)
        for size in sizes
        for amounts in [amounts_of(settings, size, int(settings.set_bytes))]
    )
    return 6 * max(sets)
