"""The scheduler's side of the connector: what to load, what to store, and when blocks are free.

Pure decisions: no torch, no bytes. A page is one block of every KV cache group; its slot packs the
block ids of all groups into one number.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request, RequestStatus

from tiered_kv.counters import StoreStats
from tiered_kv.decider import Decider, Ended, Hit
from tiered_kv.keys import PageKey
from tiered_kv.orders import Job, Order, RankFacts
from tiered_kv.plan import DISK, HOST, Gate
from tiered_kv.plugins.vllm.events import open_event_log
from tiered_kv.plugins.vllm.geometry import block_tokens, layout_of
from tiered_kv.plugins.vllm.identity import adapter_root, namespace_root
from tiered_kv.plugins.vllm.messages import StepReport
from tiered_kv.plugins.vllm.settings import TieredKVSettings
from tiered_kv.plugins.vllm.tracked import Fetch, Tracked
from tiered_kv.storage.attached import pack_blocks

BlockIds = Sequence[Sequence[int]]
"""A request's block table: block ids of every KV cache group."""


class _Stretch(NamedTuple):
    """Pages [first, end) of a request that a job is about, and the blocks it reads."""

    tracked: Tracked
    first: int
    end: int
    blocks: frozenset[int] = frozenset()


class SchedulerSide:
    """Decides for one engine. Called by the engine core's thread alone.

    Until every rank has said what it holds, in the first step, lookups answer "ask again".

    Args:
        layerwise: loads for requests of the same step, layer by layer, where all is on host.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        settings: TieredKVSettings,
        *,
        layerwise: bool,
    ) -> None:
        self._settings = settings
        self._vllm_config = vllm_config
        self._layout = layout_of(kv_cache_config, vllm_config)
        self._tokens = block_tokens(kv_cache_config)
        self._blocks = kv_cache_config.num_blocks
        self._groups = list(range(len(kv_cache_config.kv_cache_groups)))
        self._layerwise = layerwise
        self._ranks = vllm_config.parallel_config.world_size
        self._root = namespace_root(vllm_config, self._layout, settings)
        self._gate = _gate(settings, self._tokens)
        self._facts: dict[int, RankFacts] = {}
        self._decider: Decider | None = None
        self._tracked: dict[str, Tracked] = {}
        self._wanted: deque[str] = deque()  # requests whose prefetch has not been started
        self._fetches: dict[int, _Stretch] = {}  # by job
        self._puts: dict[int, _Stretch] = {}
        self._readers: dict[int, set[int]] = {}  # block -> puts that still read it
        self._taken: set[int] = set()  # blocks the engine has given out in this step
        self._events = open_event_log(vllm_config, kv_cache_config)
        self._changes: dict[tuple[str, PageKey], bool] = {}  # (tier, page) -> is there
        self._left: list[BlockIds] = []  # of requests that ended since the last report
        self._busy_until = 0.0
        self.cache: KVCacheManager | None = None

    # -- a request comes ---------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """A request has been queued: if pages of it are on disk alone, they start coming up."""
        tracked = self._track(request)
        if self._decider is not None:
            self._consider_fetch(tracked)

    def _track(self, request: Request) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:
            root = adapter_root(self._root, request.lora_request)
            tracked = self._tracked[request.request_id] = Tracked(request, root)
        tracked.extend()
        return tracked

    def _consider_fetch(self, tracked: Tracked) -> None:
        first = self._cached_pages(tracked)
        keys = tracked.keys[first : self._loadable_end(tracked, first)]
        hit = self._need_decider().match(keys, self._gate)
        if hit.ready > hit.on_host and tracked.want_fetch():
            self._wanted.append(tracked.request.request_id)

    def _cached_pages(self, tracked: Tracked) -> int:
        """Leading pages that the engine has itself at this moment."""
        if self.cache is None or not self._vllm_config.cache_config.enable_prefix_caching:
            return 0
        for at, block_hash in enumerate(tracked.request.block_hashes):
            if self.cache.block_pool.get_cached_block(block_hash, self._groups) is None:
                return at
        return len(tracked.request.block_hashes)

    def _loadable_pages(self, tracked: Tracked) -> int:
        """Pages that may come from the store: one token at least must be computed."""
        tokens: int = tracked.request.num_tokens
        return min(len(tracked.keys), (tokens - 1) // self._tokens)

    def _loadable_end(self, tracked: Tracked, first: int) -> int:
        """The end of what is loaded for it at most, from page `first` on."""
        limit = self._settings.max_load_tokens
        end = self._loadable_pages(tracked)
        return end if limit is None else min(end, first + limit // self._tokens)

    # -- lookup and load ---------------------------------------------------------------------------

    def matched_tokens(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens the store has beyond those computed, and whether the request must wait for them.

        None: ask again in the next step. Changes nothing in the store, and no other request.
        """
        tracked = self._track(request)
        if self._decider is None:
            return None, False
        tracked.local_pages = first = computed_tokens // self._tokens
        tracked.why_computed = "failed"
        if not tracked.may_load:
            return 0, False
        deadline_s = self._settings.prefetch_deadline_s
        if tracked.fetch is not Fetch.NONE and not tracked.is_late(deadline_s):
            return None, False
        keys = tracked.keys[first : self._loadable_end(tracked, first)]
        hit = self._decider.match(keys, self._gate)
        tracked.why_computed = hit.why_cut or "not_worth_loading"
        pages = hit.ready
        if self._must_wait(tracked, hit):
            if not tracked.is_late(deadline_s):
                return None, False
            pages, tracked.why_computed = hit.on_host, "in_flight"
        tracked.is_awaited = not self._layerwise or pages > hit.on_host
        return pages * self._tokens, tracked.is_awaited and pages > 0

    def _must_wait(self, tracked: Tracked, hit: Hit) -> bool:
        """Whether pages are still on their way to host; those on disk alone start now."""
        if tracked.fetch is Fetch.NONE and hit.ready > hit.on_host and tracked.want_fetch():
            self._wanted.appendleft(tracked.request.request_id)  # its turn: before all others
        return tracked.fetch is not Fetch.NONE or hit.pages > hit.ready

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The engine has given the request blocks: plan its load into them."""
        decider = self._need_decider()
        tracked = self._track(request)
        first, count = tracked.local_pages, external_tokens // self._tokens
        if not tracked.is_counted:
            tracked.is_counted = True
            left = tracked.keys[first + count : self._loadable_pages(tracked)]
            decider.count_misses(left, tracked.why_computed)
        fetched_pages = tracked.fetched_pages
        tracked.served(is_loading=count > 0 and tracked.is_awaited)
        if count == 0:
            return
        table = blocks.get_block_ids()
        self._take_blocks(table, first)
        keys = tracked.keys[first : first + count]
        slots = [self._slot(table, page) for page in range(first, first + count)]
        job = decider.get(keys, slots, request.request_id, is_awaited=tracked.is_awaited)
        tracked.sources = _by_source(job, fetched_pages)

    def hit_sources(self, request: Request, tokens: int) -> dict[CacheHitSource, int]:
        """Which tier the tokens of the last load come from."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return {CacheHitSource.HOST: tokens}
        disk = min(tokens, tracked.sources.get(DISK, 0) * self._tokens)
        split = {CacheHitSource.DISK: disk, CacheHitSource.HOST: tokens - disk}
        return {source: count for source, count in split.items() if count}

    def _slot(self, table: BlockIds, page: int) -> int:
        return pack_blocks([group[page] for group in table], self._blocks)

    # -- the end of a schedule ---------------------------------------------------------------------

    def build(self, scheduled: SchedulerOutput) -> Order:
        """All that was decided in this step, what it will have computed included."""
        if self._decider is None:
            return Order()
        self._start_fetches(self._decider)
        new, cached = scheduled.scheduled_new_reqs, scheduled.scheduled_cached_reqs
        computed = {data.req_id: data.num_computed_tokens for data in new}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for data in new:
            self._take_blocks(data.block_ids, data.num_computed_tokens // self._tokens)
        for request_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            is_whole = request_id in cached.resumed_req_ids
            self._take_blocks(ids or (), computed[request_id] // self._tokens if is_whole else 0)
        for request_id in scheduled.preempted_req_ids or ():
            if request_id in self._tracked:
                self._tracked[request_id].restart()
        fences = {put for block in self._taken for put in self._readers.get(block, ())}
        self._taken = set()
        for request_id, tokens in scheduled.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.is_loading = False
                end = self._storable_pages(tracked, computed[request_id] + tokens)
                if tracked.may_put and end > tracked.next_try:  # only now: a table costs time
                    table = scheduled.kv_connector_block_state.get_block_ids(request_id)
                    self._put(tracked, table, end)
        order = self._decider.order(fences)
        if order.jobs:
            self._busy_until = time.monotonic() + self._settings.load_deadline_s
        return order

    def _storable_pages(self, tracked: Tracked, computed_tokens: int) -> int:
        """Leading pages of which all tokens are known and computed."""
        tracked.extend()
        request = tracked.request
        if self._settings.store == "prompt":
            computed_tokens = min(computed_tokens, request.num_prompt_tokens)
        return min(computed_tokens // self._tokens, len(tracked.keys))

    def _put(self, tracked: Tracked, table: BlockIds, end: int) -> None:
        """Give the store the pages before `end` that it has not taken yet."""
        first, end = tracked.next_put, min(end, *map(len, table))
        for page in range(end - 1, first - 1, -1):  # blocks that have left a sliding window
            if any(group[page] == 0 for group in table):
                first = page + 1
                break
        if first >= end:
            tracked.given(first, first, 0)
            return
        slots = [self._slot(table, page) for page in range(first, end)]
        owner = tracked.request.request_id
        job, not_stored = self._need_decider().put(tracked.chain(first, end), slots, owner)
        tracked.given(first, end, not_stored)
        if job is None:
            return
        stored = {move.source_slot for move in job.plan.store}
        read = [page for page, slot in enumerate(slots, first) if slot in stored]
        blocks = frozenset(group[page] for group in table for page in read)
        self._puts[job.id] = _Stretch(tracked, first, end, blocks)
        for block in blocks:
            self._readers.setdefault(block, set()).add(job.id)

    def _take_blocks(self, table: BlockIds, first: int) -> None:
        """The engine will overwrite these blocks: who still reads them must be through.

        All groups have their blocks from one pool: what one gives back, another may get.
        """
        for group in table:
            self._taken.update(group[first:])

    def _start_fetches(self, decider: Decider) -> None:
        """Begin prefetches, as long as what they bring is sure to be used before it must leave."""
        budget = decider.capacity_pages[HOST] // 2
        budget -= sum(tracked.fetched_pages for tracked in self._tracked.values())
        while self._wanted and (budget > 0 or not self._fetches):
            tracked = self._tracked.get(self._wanted.popleft())
            if tracked is None or tracked.fetch is not Fetch.WANTED:
                continue
            first = self._cached_pages(tracked)
            end = self._loadable_end(tracked, first)
            job = decider.prefetch(tracked.keys[first:end], tracked.request.request_id)
            tracked.fetches += 1
            if job is None:
                tracked.fetch = Fetch.NONE
                continue
            tracked.fetch = Fetch.UNDER_WAY
            tracked.fetched_pages = len(job.plan.load)
            budget -= len(job.plan.load)
            self._fetches[job.id] = _Stretch(tracked, first, end)

    # -- what became of it -------------------------------------------------------------------------

    def take(self, step: StepReport | None) -> None:
        """The ranks' report of a step."""
        self._left = []
        if step is None:
            return
        if step.facts:
            self._introduce(step.facts)
        if self._decider is None:
            return
        failed = self._decider.failed_owners(step.report)
        for ended in self._decider.take(step.report):
            self._busy_until = time.monotonic() + self._settings.load_deadline_s
            if ended.job.kind == "put":
                self._put_ended(ended)
            elif ended.job.kind == "prefetch":
                stretch = self._fetches.pop(ended.job.id)
                stretch.tracked.fetch = Fetch.NONE
                self._tell(stretch)
            elif ended.arrived < len(ended.job.slots):
                failed.add(ended.job.owner)
        for owner in failed & self._tracked.keys():
            self._tracked[owner].load_failed()

    def disown(self, blocks: set[int]) -> None:
        """Blocks do not hold what they should, nor do those computed over them: forget their names.

        vLLM keeps the names, as they will be computed again; but in chunks that may take many
        steps, and requests that come meanwhile would take the blocks as they are.
        """
        if self.cache is None or len(self._groups) > 1:
            return
        tables = [self.cache.get_block_ids(request_id) for request_id in self._tracked]
        for (table,) in tables + self._left:
            first = next((at for at, block in enumerate(table) if block in blocks), len(table))
            self.cache.evict_blocks(set(table[first:]))

    def _introduce(self, facts: dict[int, RankFacts]) -> None:
        self._facts.update(facts)
        if len(self._facts) < self._ranks:
            return
        self._decider = Decider(
            [self._facts[rank] for rank in sorted(self._facts)],
            policy=self._settings.policy,
            write_through=self._settings.write_policy == "through",
            on_change=self._note_change if self._events is not None else None,
        )
        self._facts = {}
        for tracked in self._tracked.values():
            self._consider_fetch(tracked)

    def _put_ended(self, ended: Ended) -> None:
        put = self._puts.pop(ended.job.id)
        for block in put.blocks:
            self._readers[block].discard(ended.job.id)
            if not self._readers[block]:
                del self._readers[block]
        if ended.not_stored:
            put.tracked.turned_down(put.first + ended.not_stored[0], put.end)
        self._tell(put)

    def request_finished(self, request: Request, block_ids: BlockIds) -> None:
        """A request ends and its blocks will be given to others: store what is left of it."""
        tracked = self._tracked.pop(request.request_id, None)
        self._left.append(block_ids)
        if tracked is None or self._decider is None:
            return
        if request.status == RequestStatus.FINISHED_ERROR or tracked.is_loading or not block_ids:
            return
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        end = self._storable_pages(tracked, computed)
        if tracked.may_put and end > tracked.next_put:
            self._put(tracked, block_ids, end)

    @property
    def has_running(self) -> bool:
        """Whether a request runs, in this step or, with several batches in flight, in another."""
        requests = (tracked.request for tracked in self._tracked.values())
        return any(request.status == RequestStatus.RUNNING for request in requests)

    @property
    def is_busy(self) -> bool:
        """Whether steps are needed though no request asks for one: orders to give, ends to learn.

        Not for ever: what hangs must not keep an engine that is idle, or stops, going round.
        """
        if self._decider is None or not self._decider.jobs_in_flight:
            return False
        return self._decider.has_orders or time.monotonic() < self._busy_until

    # -- care --------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything: the weights may have changed, so no old page may ever match."""
        self._root = namespace_root(
            self._vllm_config, self._layout, self._settings, secrets.token_hex(16)
        )
        for tracked in self._tracked.values():
            tracked.rename(adapter_root(self._root, tracked.request.lora_request))
        if self._decider is not None:
            self._decider.clear()

    def stats(self) -> StoreStats | None:
        """What was decided so far; None before all ranks are known."""
        return None if self._decider is None else self._decider.stats()

    def _note_change(self, tier: str, key: PageKey, is_there: bool) -> None:
        self._changes[tier, key] = is_there

    def _tell(self, stretch: _Stretch) -> None:
        """Events for the pages of an ended job, which vLLM's hashes and tokens are known of."""
        if self._events is None:
            return
        tracked, request = stretch.tracked, stretch.tracked.request
        tracked.extend()
        for tier in (HOST, DISK):
            new = [
                page
                for page in range(stretch.first, min(stretch.end, len(tracked.keys)))
                if self._changes.get((tier, tracked.keys[page]))
            ]
            for page in new:
                del self._changes[tier, tracked.keys[page]]
            for first, end in _runs(new):
                self._events.stored(
                    dict(zip(tracked.keys[first:end], tracked.hashes[first:end], strict=True)),
                    tier,
                    parent=tracked.hashes[first - 1] if first else None,
                    token_ids=request.all_token_ids[first * self._tokens : end * self._tokens],
                    lora_request=request.lora_request,
                )

    def events(self) -> Iterable[KVCacheEvent]:
        """Pages stored and removed since the last call."""
        if self._events is None:
            return ()
        changes, self._changes = self._changes, {}
        for (tier, key), is_there in changes.items():
            block_hash = self._events.hash_of(key)
            if not is_there:
                self._events.removed([key], tier)
            elif block_hash is not None:
                self._events.stored({key: block_hash}, tier)
        return self._events.take()

    def _need_decider(self) -> Decider:
        assert self._decider is not None, "vLLM loads only what a lookup has promised"
        return self._decider


def _runs(pages: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Ascending pages as runs [first, end) of consecutive ones."""
    first = end = -1
    for page in pages:
        if page != end:
            if end > first:
                yield first, end
            first = page
        end = page + 1
    if end > first:
        yield first, end


def _gate(settings: TieredKVSettings, page_tokens: int) -> Gate:
    rate = settings.prefill_tokens_per_s
    return Gate(
        -(-settings.min_load_tokens // page_tokens), None if rate is None else page_tokens / rate
    )


def _by_source(job: Job, fetched_pages: int) -> dict[str, int]:
    """Pages of a load by where they were: on disk too if a prefetch has just brought them."""
    disk = min(len(job.plan.sources), job.plan.sources.count(DISK) + fetched_pages)
    return {DISK: disk, HOST: len(job.plan.sources) - disk}
