"""What travels inside vLLM's own messages between its scheduler and its workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tiered_kv.orders import Order, RankFacts, Report


@dataclass
class StepOrder(KVConnectorMetadata):
    """Down, in every step.

    Attributes:
        is_idle: no request runs: they wait for loads, or stores are still under way.
    """

    order: Order
    is_idle: bool = False


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Up, when there is something to say.

    Attributes:
        facts: of each rank that reports for the first time, by rank.
    """

    report: Report = field(default_factory=Report)
    facts: dict[int, RankFacts] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """Merge what another rank says of the same step."""
        assert isinstance(other, StepReport)
        self.report.merge(other.report)
        self.facts.update(other.facts)
        return self
