"""The same replay without bytes: what the index, the policy and the plans alone decide."""

from __future__ import annotations

from collections.abc import Mapping

from tiered_kv.keys import KeyChain
from tiered_kv.plan import HBM, Gate
from tiered_kv.planner import Planner
from tiered_kv.replay.engines.rounds import PromptKeys, load_in_rounds, store_in_rounds
from tiered_kv.replay.requests import TIERS, Outcome, Request, Workload
from tiered_kv.slots import SlotPool


class DecidedEngine:
    """Makes every decision that a `TimedEngine` leads a store to, and moves nothing.

    Args:
        prompt_keys: how prompts are cut into pages.
        capacity_pages: pages each tier holds, by name.
        policy: eviction policy.
        write_through: whether pages go to disk at once.
        min_load_pages: a hit shorter than this is not loaded.
    """

    name = "decided"

    def __init__(
        self,
        prompt_keys: PromptKeys,
        capacity_pages: Mapping[str, int],
        *,
        policy: str,
        write_through: bool,
        min_load_pages: int = 0,
    ) -> None:
        self._gate = Gate(min_load_pages)
        self._keys = prompt_keys
        self._hbm_pages = capacity_pages[HBM]
        self._planner = Planner(
            {tier: SlotPool(pages) for tier, pages in capacity_pages.items()},
            capacity_pages,
            policy=policy,
            write_through=write_through,
        )

    def serve(self, request: Request) -> Outcome:
        """Decide for one prompt; takes no time."""
        keys = self._keys.of_prompt(request)
        tiers = load_in_rounds(keys, self._hbm_pages, self._stored_pages, self._get)
        reply = self._keys.reply(request)
        answered = self._keys.of_answered(request, keys, reply)
        store_in_rounds(answered, len(tiers), self._hbm_pages, self._put)
        reused = self._keys.tokens_by_tier(tiers, request.prompt_tokens)
        return Outcome(reused, 0.0, 0.0, True, reply)

    def _stored_pages(self, keys: KeyChain) -> int:
        return len(self._planner.index.match(keys))

    def _get(self, keys: KeyChain) -> list[str]:
        plan = self._planner.carry_out(self._planner.plan_get(keys, gate=self._gate))
        self._planner.release(plan.pages)
        return list(plan.sources)

    def _put(self, keys: KeyChain) -> bool:
        slots = self._planner.room.exactly(HBM, len(keys))
        if slots is None:
            return False
        self._planner.carry_out(self._planner.plan_put(keys, slots))
        return True


def decided_tokens(engine: DecidedEngine, workload: Workload, requests: int) -> dict[str, int]:
    """Hit tokens by tier that the decisions alone give for the first requests of a workload."""
    tokens = dict.fromkeys(TIERS, 0)
    for position, request in enumerate(workload):
        if position >= requests:
            break
        outcome = engine.serve(request)
        workload.answered(request, outcome.reply_ids)
        for tier, count in outcome.reused_tokens.items():
            tokens[tier] += count
    return tokens
