"""A planner with pretended bytes: which page's bytes stand in which slot, and no more.

It carries plans out one move at a time, in any order that the mover's events allow, with the bytes
copied at the earliest or the latest moment, and with any move failing. What a get() then claims to
have brought is compared with what really stands in its slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from contracts import key_of

from tiered_kv.found import FoundPages, StoredPage
from tiered_kv.keys import KeyChain, PageKey
from tiered_kv.plan import DISK, HBM, HOST, Move, Plan
from tiered_kv.planner import Planner
from tiered_kv.slots import SlotPool


def chain(*names: object) -> KeyChain:
    """One key a name; the same name is the same key."""
    return KeyChain([key_of(name) for name in names])


@dataclass(eq=False)
class Arrival:
    """A page on its way into a tier."""

    is_over: bool = False


@dataclass(eq=False)
class Flight:
    """A plan being carried out."""

    plan: Plan
    keys: KeyChain
    known: dict[tuple[str, int], Arrival]
    arrivals: dict[tuple[str, int], Arrival]
    queued: list[Move]
    is_leased: bool = False
    begun: list[tuple[Move, bool, bool]] = field(default_factory=list)  # move, ok, copied already
    lost: set[int] = field(default_factory=set)
    is_over: bool = False

    def arrived_pages(self) -> int:
        """How many leading pages came."""
        pages = self.plan.pages
        return next((at for at, page in enumerate(pages) if page in self.lost), len(pages))


class PlannerRig:
    """A planner over bare slots. With 0 pages a tier is left out."""

    def __init__(
        self, hbm: int, host: int, disk: int, *, policy: str = "lru", write_through: bool = False
    ) -> None:
        self.capacity = {n: c for n, c in ((HBM, hbm), (HOST, host), (DISK, disk)) if c}
        self.options = {"policy": policy, "write_through": write_through}
        self.contents: dict[tuple[str, int], PageKey | None] = {}
        self.owned: set[int] = set()
        self.flights: list[Flight] = []
        self.leases: list[Flight] = []
        self._arrivals: dict[tuple[str, int], Arrival] = {}
        self._start([])

    def _start(self, found: Sequence[StoredPage]) -> None:
        self.pools = {name: SlotPool(pages) for name, pages in self.capacity.items()}
        for page in found:
            self.pools[DISK].reserve_exact(page.slot)
        self.planner = Planner(
            self.pools,
            self.capacity,
            policy=str(self.options["policy"]),
            write_through=bool(self.options["write_through"]),
        )
        if found:
            self.planner.adopt(DISK, FoundPages.of(found))

    def restart(self) -> None:
        """Close and open again: only what is on disk is left. Nothing may be in flight."""
        assert not self.flights
        found = self.on_disk()
        self.contents = {place: key for place, key in self.contents.items() if place[0] == DISK}
        self.owned, self.leases, self._arrivals = set(), [], {}
        self._start(found)

    def on_disk(self) -> list[StoredPage]:
        index, disk = self.planner.index, self.planner.index.by_name[DISK]
        return [
            StoredPage(index.key(page), index.parent_key(page), disk.slot[page])
            for page in sorted(index, key=disk.last_use)
            if disk.is_resident(page)
        ]

    # -- calls -------------------------------------------------------------------------------------

    def allocate(self, n: int) -> list[int] | None:
        slots = self.planner.room.exactly(HBM, n)
        for slot in slots or ():
            self.contents[HBM, slot] = None
            self.owned.add(slot)
        return slots

    def release_owned(self, slots: Iterable[int]) -> None:
        slots = list(slots)
        self.owned.difference_update(slots)
        self.planner.room.free(HBM, slots)

    def begin_put(self, keys: KeyChain, slots: Sequence[int] | None = None) -> Flight | None:
        """Put pages that a caller has computed; None if HBM has no room to compute them in."""
        if HBM in self.capacity:
            slots = self.allocate(len(keys)) if slots is None else slots
            if slots is None:
                return None
            self.owned.difference_update(slots)
        else:
            slots = list(range(len(keys)))  # the engine's own
        for slot, key in zip(slots, keys, strict=True):
            self.contents[HBM, slot] = key
        return self._take_off(self.planner.plan_put(keys, slots), keys)

    def begin_get(self, keys: KeyChain, into: Sequence[int] | None = None) -> Flight:
        plan = self.planner.plan_get(keys, into=into)
        return self._take_off(plan, keys, is_leased=into is None)

    def begin_prefetch(self, keys: KeyChain) -> Flight:
        return self._take_off(self.planner.plan_prefetch(keys), keys)

    def begin_flush(self, max_pages: int) -> Flight:
        return self._take_off(
            self.planner.plan_flush(self.planner.dirty_pages()[:max_pages]), KeyChain([])
        )

    def put(self, keys: KeyChain) -> Flight:
        """Put pages and let everything land."""
        flight = self.begin_put(keys)
        assert flight is not None, "no room in HBM for the caller's pages"
        self.land(flight)
        return flight

    def get(self, keys: KeyChain, into: Sequence[int] | None = None) -> Flight:
        flight = self.begin_get(keys, into)
        self.land(flight)
        return flight

    def prefetch(self, keys: KeyChain) -> Flight:
        flight = self.begin_prefetch(keys)
        self.land(flight)
        return flight

    def release(self, flight: Flight) -> None:
        """End a lease; what was leased must still stand there."""
        self.leases.remove(flight)
        self._expect_bytes(flight)
        self.planner.release(flight.plan.pages)

    def tiers_of(self, *names: object) -> list[str]:
        """For each name the tiers that hold it, as "hbm+host"."""
        index = self.planner.index
        pages = [index.find(key_of(name)) for name in names]
        return [
            "+".join(tier.name for tier in index.tiers if page >= 0 and tier.is_resident(page))
            for page in pages
        ]

    # -- moves -------------------------------------------------------------------------------------

    def _take_off(self, plan: Plan, keys: KeyChain, *, is_leased: bool = False) -> Flight:
        moves = list(plan.moves())
        known = {
            (move.source, move.page): self._arrivals[move.source, move.page]
            for move in moves
            if move.waits and (move.source, move.page) in self._arrivals
        }
        mine = {
            (move.target, move.page): Arrival()
            for move in moves
            if self.planner.is_arriving(move) and not (move.is_in_place and move in plan.fill)
        }
        for step in plan.steps():
            arriving = [move for move in step if self.planner.is_arriving(move)]
            assert list(self.planner.arriving(step)) == arriving
        self._arrivals.update(mine)
        flight = Flight(plan, keys, {**known, **mine}, mine, moves, is_leased)
        self.flights.append(flight)
        if not moves:
            self._end(flight)
        return flight

    def ready(self, flight: Flight) -> list[Move]:
        """Moves that nothing holds up; writes to disk go one by one, as on the mover's stream."""
        ready = [move for move in flight.queued if self._may_begin(flight, move)]
        is_writing = any(move.target == DISK for move, _, _ in flight.begun)
        first_write = next((move for move in flight.queued if move.target == DISK), None)
        return [m for m in ready if m.target != DISK or (m is first_write and not is_writing)]

    def _may_begin(self, flight: Flight, move: Move) -> bool:
        if move in flight.plan.bind:
            return True
        source = flight.known.get((move.source, move.page)) if move.waits else None
        if source is not None and not source.is_over:
            return False
        return move.after < 0 or flight.arrivals[DISK, move.after].is_over

    def begin(
        self,
        flight: Flight,
        move: Move,
        *,
        fails: bool = False,
        is_corrupt: bool = False,
        copy_late: bool = False,
    ) -> None:
        """A worker takes a move up, finds out whether it can be made, and copies now or later."""
        flight.queued.remove(move)
        is_bind = move in flight.plan.bind  # the bytes are there already: it cannot fail
        ok = is_bind or (self._is_possible(move) and not fails)
        if ok and is_corrupt and move.source == DISK:
            self.planner.condemn(move, "corrupt")
            ok = False
        if ok and not copy_late:
            self._copy(move)
        flight.begun.append((move, ok, not copy_late))

    def _is_possible(self, move: Move) -> bool:
        if move.target == DISK:
            return bool(self.planner.durable([move]))
        is_possible = self.planner.is_possible(move)
        assert self.planner.possible([move]) == [move] * is_possible
        return is_possible

    def publish(self, flight: Flight, at: int = 0) -> None:
        """A move that was taken up is over."""
        move, ok, is_copied = flight.begun.pop(at)
        if ok and not is_copied:
            self._copy(move)
        if ok:
            self.planner.arrived(move)
        else:
            self.planner.failed(move)
            flight.lost.add(move.page)
        self._note_over(flight, [move])

    def publish_together(self, flight: Flight, at: int = 0) -> None:
        """A move that was taken up is over, with all others into its tier that went well."""
        target, ok = flight.begun[at][0].target, flight.begun[at][1]
        if not ok:
            self.publish(flight, at)
            return
        made = [entry for entry in flight.begun if entry[1] and entry[0].target == target]
        flight.begun = [entry for entry in flight.begun if entry not in made]
        for move, _, is_copied in made:
            if not is_copied:
                self._copy(move)
        self.planner.arrived_all([move for move, _, _ in made])
        self._note_over(flight, [move for move, _, _ in made])

    def _note_over(self, flight: Flight, moves: Sequence[Move]) -> None:
        for place in [(move.target, move.page) for move in moves]:
            if place in flight.arrivals:
                flight.arrivals[place].is_over = True
                if self._arrivals.get(place) is flight.arrivals[place]:
                    del self._arrivals[place]
        if not flight.queued and not flight.begun:
            self._end(flight)

    def _copy(self, move: Move) -> None:
        self.contents[move.target, move.target_slot] = self.contents.get(
            (move.source, move.source_slot)
        )

    def _end(self, flight: Flight) -> None:
        flight.is_over = True
        self.flights.remove(flight)
        self.planner.end(flight.plan)
        if flight.plan.sources and flight.plan.slots:
            self._expect_bytes(flight)
            if flight.is_leased:
                self.leases.append(flight)

    def _expect_bytes(self, flight: Flight) -> None:
        for at in range(flight.arrived_pages()):
            slot = flight.plan.slots[at]
            assert self.contents[HBM, slot] == flight.keys[at], "a page came back as another"

    def land(self, flight: Flight) -> None:
        """Carry a plan out to its end, and what it waits for; nothing fails."""
        while not flight.is_over:
            self.step(flight)

    def land_all(self) -> None:
        """Carry out whatever is in flight."""
        while self.flights:
            self.step(self.flights[0])

    def step(self, flight: Flight) -> None:
        """One move of a plan, or of another that it waits for."""
        for candidate in [flight, *self.flights]:
            if candidate.begun:
                return self.publish(candidate)
            ready = self.ready(candidate)
            if ready:
                return self.begin(candidate, ready[0])
        raise AssertionError("plans wait for each other in a ring")

    # -- proof -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Whatever must hold at every moment."""
        settled = not self.flights and not self.leases
        problems = self.planner.index.check(lambda: settled)
        if self._is_a_page_back():
            problems = [line for line in problems if line != "two pages share a slot of host"]
        assert problems == []
        for name, pool in self.pools.items():
            assert self._slots_in_use(name) == pool.used, f"slots of {name} leak"
            assert self.planner.room.free_pages[name] == pool.capacity - pool.used
            assert pool.used <= self.capacity[name]
        index = self.planner.index
        for tier in index.tiers:
            for page in index:
                if tier.is_resident(page):
                    held = self.contents[tier.name, tier.slot[page]]
                    assert held == index.key(page), f"{tier.name} has another page's bytes"

    def _is_a_page_back(self) -> bool:
        """Whether a page that could not leave is in the slot that another was promised.

        That other fails as soon as its turn comes; until then the index counts both.
        """
        host = self.planner.index.by_name[HOST]
        waiting = [move for flight in self.flights for move in flight.queued]
        waiting += [move for flight in self.flights for move, ok, _ in flight.begun if not ok]
        return any(m.after >= 0 and host.slot[m.after] == m.target_slot for m in waiting)

    def _slots_in_use(self, name: str) -> int:
        tier = self.planner.index.by_name[name]
        slots = {tier.slot[page] for page in self.planner.index if tier.state[page]}
        slots |= set(tier.doomed.values())
        if name == HBM:
            slots |= self.owned
            slots |= {slot for flight in self.flights for slot in flight.plan.spare_slots}
        if name == HOST:  # a slot between the page that leaves and the one that failed to come
            slots |= {
                move.source_slot
                for flight in self.flights
                for move in flight.plan.demote
                if move.leaves and not flight.arrivals[DISK, move.page].is_over
            }
        return len(slots)
