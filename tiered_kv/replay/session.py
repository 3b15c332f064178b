"""One replay from settings to report: workload, store, engine, and what is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiered_kv.config import StoreConfig
from tiered_kv.errors import ConfigError
from tiered_kv.layout import KVLayout
from tiered_kv.replay.clock import ComputeSpeed
from tiered_kv.replay.conversations import ConversationWorkload, Shape, generate, recorded_turns
from tiered_kv.replay.decided import DecidedEngine, decided_tokens
from tiered_kv.replay.engines.base import Engine
from tiered_kv.replay.engines.rounds import PromptKeys
from tiered_kv.replay.engines.timed import TimedEngine
from tiered_kv.replay.footprint import PeakMemory
from tiered_kv.replay.messages import is_dialogue_file, read_dialogues
from tiered_kv.replay.report import (
    INDEX_BYTES_A_PAGE,
    MemoryUse,
    ReplayReport,
    TurnRecord,
    budget_bytes,
)
from tiered_kv.replay.requests import Request, Workload, as_ids
from tiered_kv.replay.run import Replayed, replay
from tiered_kv.replay.settings import (
    DEFAULT_MODEL,
    DEFAULT_PAGE_BYTES,
    DEFAULT_PREFILL_TOKENS_PER_S,
    STORE_ENGINES,
    ReplaySettings,
)
from tiered_kv.replay.tokenizer import ByteTokenizer, Tokenizer
from tiered_kv.replay.traces import BlockWorkload, SpelledWorkload, read_trace
from tiered_kv.store import TieredStore, resolve_device

if TYPE_CHECKING:
    from tiered_kv.replay.engines.models import LoadedModel

Show = Callable[[int, int, str], None]
"""Told after every request: how many are done, of how many, and a few words."""

_TIMED_VOCABULARY = 4096


def run_replay(settings: ReplaySettings, show: Show | None = None) -> ReplayReport:
    """Run a replay to its end or a KeyboardInterrupt; blocks. Always closes the store.

    Raises:
        ConfigError: an input or a setting that cannot be used; nothing has been changed.
        TieredKVError: the store could not be opened.
    """
    if settings.engine not in STORE_ENGINES:
        raise ConfigError(f"engine={settings.engine}: has no store of ours; use run_live_replay")
    if settings.engine == "hf":
        return _HuggingFaceReplay(settings).run(show)
    return _TimedReplay(settings).run(show)


@dataclass(slots=True)
class _Memory:
    """Most bytes that the tiers in memory had in use, polled after every request."""

    store: TieredStore
    most_bytes: int = 0

    def poll(self) -> None:
        usage = self.store.usage()
        used = sum(usage[tier][0] for tier in ("hbm", "host") if tier in usage)
        self.most_bytes = max(self.most_bytes, used)


def _empty_run(layout: KVLayout, hbm_bytes: int) -> None:
    """One page through a store of two: what the first copy of a process costs is not the store's.

    Threads, torch's own memory and code pages would otherwise be counted with it.
    """
    if layout.page_bytes > hbm_bytes:
        return  # opening the real store says what is wrong
    slot_bytes = layout.page_bytes + 4096  # host slots end on a page of memory
    smallest = StoreConfig.parse(hbm=2 * slot_bytes, host=2 * slot_bytes)
    with TieredStore.open(layout, smallest) as store:
        keys = PromptKeys(layout.fingerprint, 1, layout.page_tokens)
        engine = TimedEngine(store, keys, ComputeSpeed())
        for _ in range(2):
            engine.serve(Request(None, None, 0.0, as_ids([0]), layout.page_tokens, 1))


class _Replay:
    """What both engines share. A subclass sets workload and layout before `run`."""

    workload: Workload
    layout: KVLayout
    model_name = ""

    def __init__(self, settings: ReplaySettings) -> None:
        self.settings = settings

    def engine(self, store: TieredStore) -> Engine:
        raise NotImplementedError

    def run(self, show: Show | None) -> ReplayReport:
        config = self.settings.store_config(self.model_name)
        _empty_run(self.layout, int(self.settings.hbm))
        peak = PeakMemory()
        with TieredStore.open(self.layout, config) as store:
            found_pages = store.stats().resident_pages.get("disk", 0)
            memory = _Memory(store)
            done = self._replay(self.engine(store), memory, show)
            memory_use = self._memory_use(store, memory, peak)
            stats = store.stats()
        return ReplayReport(
            engine=self.settings.engine,
            turns=done.turns,
            bytes_read=stats.bytes_read,
            bytes_written=stats.bytes_written,
            checksums_verified=stats.checksums_verified,
            checksums_failed=stats.checksums_failed,
            why_miss=stats.why_miss,
            memory=memory_use,
            requests_planned=self.planned,
            wall_s=done.wall_s,
            interrupted=done.interrupted,
            settings=self.settings.told(),
            failed_writes=stats.failed_writes,
            **self.extras(len(done.turns), is_comparable=not found_pages + stats.failed_writes),
        )

    @property
    def planned(self) -> int:
        return min(len(self.workload), self.settings.limit or len(self.workload))

    def extras(self, requests: int, *, is_comparable: bool) -> dict[str, Any]:
        return {}

    def _replay(self, engine: Engine, memory: _Memory, show: Show | None) -> Replayed:
        prompt_tokens = reused = 0

        def watch(turn: TurnRecord) -> None:
            nonlocal prompt_tokens, reused
            memory.poll()
            prompt_tokens += turn.prompt_tokens
            reused += turn.reused
            if show is not None:
                text = f"{100 * reused / prompt_tokens:.1f} % of prompt tokens reused"
                show(turn.position + 1, self.planned, text)

        return replay(engine, self.workload, limit=self.settings.limit, watch=watch)

    def _memory_use(self, store: TieredStore, memory: _Memory, peak: PeakMemory) -> MemoryUse:
        pages = sum(store.stats().resident_pages.values())
        budget = budget_bytes(int(self.settings.hbm), int(self.settings.host), pages)
        return MemoryUse(peak.peak_bytes(), budget, "process_rss")


class _TimedReplay(_Replay):
    def __init__(self, settings: ReplaySettings) -> None:
        super().__init__(settings)
        resolve_device(settings.device)
        self.workload = _workload(settings, ByteTokenizer(), _TIMED_VOCABULARY, spell=False)
        page_bytes = int(settings.page_bytes or DEFAULT_PAGE_BYTES)
        self.layout = KVLayout.uniform(page_bytes, self.workload.page_tokens)
        self._prompt_keys = PromptKeys(
            self.layout.fingerprint, self.workload.ids_a_page, self.workload.page_tokens
        )
        self._capacity_pages: dict[str, int] = {}
        self._engine: TimedEngine | None = None

    def engine(self, store: TieredStore) -> Engine:
        prefill = self.settings.prefill_tokens_per_s or DEFAULT_PREFILL_TOKENS_PER_S
        speed = ComputeSpeed(prefill, self.settings.decode_tokens_per_s)
        self._capacity_pages = store.capacity_pages()
        self._engine = TimedEngine(store, self._prompt_keys, speed)
        return self._engine

    def extras(self, requests: int, *, is_comparable: bool) -> dict[str, Any]:
        """Pages compared, and hits without bytes: unless the disk held pages before, or failed."""
        assert self._engine is not None
        decided = None
        if is_comparable:
            engine = DecidedEngine(
                self._prompt_keys,
                self._capacity_pages,
                policy=self.settings.policy,
                write_through=self.settings.write_policy == "through",
                min_load_pages=-(-self.settings.min_load_tokens // self.layout.page_tokens),
            )
            decided = decided_tokens(engine, self.workload, requests)
        return {
            "pages_compared": self._engine.pages_compared,
            "pages_wrong": self._engine.pages_wrong,
            "decided_tokens": decided,
        }


class _HuggingFaceReplay(_Replay):
    def __init__(self, settings: ReplaySettings) -> None:
        super().__init__(settings)
        from tiered_kv.replay.engines.models import load_model

        self._loaded: LoadedModel = load_model(
            settings.model or DEFAULT_MODEL,
            dtype=settings.dtype,
            device=resolve_device(settings.device),
            seed=settings.seed,
        )
        from tiered_kv.plugins.huggingface import layout_for, model_fingerprint

        self.layout = layout_for(self._loaded.model, settings.page_tokens)
        self.model_name = model_fingerprint(self._loaded.model)
        self.workload = _workload(
            settings, self._loaded.tokenizer, self._loaded.vocabulary, spell=True
        )

    def engine(self, store: TieredStore) -> Engine:
        from tiered_kv.replay.engines.hf import HuggingFaceEngine

        return HuggingFaceEngine(store, self._loaded)

    def _memory_use(self, store: TieredStore, memory: _Memory, peak: PeakMemory) -> MemoryUse:
        pages = sum(store.stats().resident_pages.values())
        used = memory.most_bytes + INDEX_BYTES_A_PAGE * pages
        budget = budget_bytes(int(self.settings.hbm), int(self.settings.host), pages)
        return MemoryUse(used, budget, "store")


def _workload(
    settings: ReplaySettings, tokenizer: Tokenizer, vocabulary: int, *, spell: bool
) -> Workload:
    """What to replay; a trace of blocks is spelled out where an engine needs tokens."""
    path = settings.trace
    if path is None:
        return ConversationWorkload(generate(_shape(settings, vocabulary)), settings.page_tokens)
    if is_dialogue_file(path):
        dialogues = read_dialogues(path, limit=settings.limit)
        turns = recorded_turns(
            dialogues, tokenizer, reply_tokens=settings.reply_tokens, seed=settings.seed
        )
        return ConversationWorkload(turns, settings.page_tokens)
    trace = read_trace(path, block_tokens=settings.trace_block_tokens, limit=settings.limit)
    if not spell:
        return BlockWorkload(trace, settings.trace_block_tokens)
    return SpelledWorkload(
        trace,
        block_tokens=settings.trace_block_tokens,
        page_tokens=settings.page_tokens,
        vocabulary=vocabulary,
        reply_tokens=settings.reply_tokens,
    )


def _shape(settings: ReplaySettings, vocabulary: int) -> Shape:
    return Shape(
        kind=settings.kind,
        conversations=settings.conversations,
        turns=settings.turns,
        is_turns_drawn=settings.draw_turns,
        context_tokens=settings.context_tokens,
        system_tokens=settings.system_tokens,
        reply_tokens=settings.reply_tokens,
        vocabulary=vocabulary,
        seed=settings.seed,
    )
