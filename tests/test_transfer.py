"""Transfer: a future whose pages are a prefix, that never hangs and never hides an error."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tiered_kv.errors import TieredKVError
from tiered_kv.plan import Plan
from tiered_kv.streams import Event
from tiered_kv.transfer import Transfer

PATIENCE_S = 30.0  # a test that waits so long has found a hang


def transfer_of(pages: int, **options: Any) -> Transfer:
    """A get of so many pages, from host into slots 10, 11, ..."""
    plan = Plan(
        pages=tuple(range(pages)),
        sources=("host",) * pages,
        slots=tuple(range(10, 10 + pages)),
    )
    return Transfer(plan, **{"layers": 2, **options})


def land(transfer: Transfer, *positions: int) -> None:
    """Everything is over; pages at these positions have come."""
    transfer.here(positions)
    lost = [at for at in range(len(transfer.plan.pages)) if at not in positions]
    transfer.lost(lost)
    transfer.settle()


# -- wait ------------------------------------------------------------------------------------------


def test_wait_gives_the_pages_that_came() -> None:
    transfer = transfer_of(3)
    land(transfer, 0, 1, 2)
    assert transfer.wait() == 3
    assert transfer.slots == [10, 11, 12]
    assert transfer.tiers == ("host",) * 3


def test_wait_blocks_until_all_is_settled() -> None:
    transfer, waited = transfer_of(1), list[int]()
    thread = threading.Thread(target=lambda: waited.append(transfer.wait(PATIENCE_S)))
    thread.start()
    transfer.here([0])
    assert not transfer.is_done
    transfer.settle()
    thread.join()
    assert waited == [1]
    assert transfer.is_done


@pytest.mark.parametrize(
    ("came", "count"), [((1, 2), 0), ((0, 2), 1), ((0, 1), 2), ((), 0), ((0, 1, 2), 3)]
)
def test_a_page_that_failed_is_a_miss_and_so_are_all_after_it(
    came: tuple[int, ...], count: int
) -> None:
    """dynamo #15079: a failed load was counted as a full hit and served."""
    transfer = transfer_of(3)
    land(transfer, *came)
    assert transfer.wait() == count
    assert transfer.slots == [10, 11, 12][:count]
    assert len(transfer.tiers) == count


def test_a_transfer_of_nothing_is_zero_pages() -> None:
    transfer = transfer_of(0)
    transfer.settle()
    assert transfer.wait() == 0
    assert transfer.slots == []


def test_wait_may_be_asked_again_and_by_several_threads() -> None:
    transfer, answers = transfer_of(2), list[int]()
    threads = [
        threading.Thread(target=lambda: answers.append(transfer.wait(PATIENCE_S))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    land(transfer, 0, 1)
    for thread in threads:
        thread.join()
    assert answers == [2] * 4
    assert transfer.wait() == transfer.wait() == 2


# -- deadlines and cancelling ----------------------------------------------------------------------


def test_what_comes_too_late_is_a_miss() -> None:
    """LMCache #2942: every wait has a deadline, and past it what is missing is a miss."""
    transfer = transfer_of(3)
    transfer.here([0])
    assert transfer.wait(timeout_s=0) == 1
    assert transfer.is_done
    assert transfer.slots == [10]


def test_a_page_that_comes_after_the_deadline_does_not_change_the_answer() -> None:
    transfer = transfer_of(3)
    transfer.here([0])
    assert transfer.wait(timeout_s=0) == 1
    land(transfer, 0, 1, 2)
    assert transfer.wait() == 1
    assert transfer.slots == [10]
    assert transfer.arrived_pages == 1


def test_the_transfers_own_deadline_holds_without_a_timeout() -> None:
    transfer = transfer_of(2, deadline_s=0.0)
    assert transfer.wait() == 0
    assert transfer.is_cancelled


def test_a_long_timeout_does_not_lengthen_the_deadline() -> None:
    assert transfer_of(2, deadline_s=0.0).wait(timeout_s=PATIENCE_S) == 0


def test_all_that_came_in_time_counts_even_when_asked_after_the_deadline() -> None:
    transfer = transfer_of(2, deadline_s=0.0)
    land(transfer, 0, 1)
    assert transfer.wait() == 2


def test_after_giving_up_what_has_not_begun_is_left_out() -> None:
    transfer = transfer_of(1)
    assert not transfer.is_cancelled
    transfer.wait(timeout_s=0)
    assert transfer.is_cancelled


def test_giving_up_does_not_settle_what_still_moves() -> None:
    """A buffer is owned until its event fires: a late copy must not hit a page given away."""
    transfer = transfer_of(1)
    transfer.wait(timeout_s=0)
    assert not transfer.settled.is_fired
    transfer.settle()
    assert transfer.settled.is_fired


def test_cancel_leaves_the_rest_out_and_what_came_counts() -> None:
    transfer = transfer_of(3)
    transfer.here([0])
    transfer.cancel()
    assert transfer.is_cancelled
    assert not transfer.is_done
    land(transfer, 0)
    assert transfer.wait() == 1


# -- errors ----------------------------------------------------------------------------------------


def test_a_copy_that_broke_surfaces_at_wait_with_its_cause() -> None:
    """imp #237: an asynchronous copy error was swallowed."""
    transfer, cause = transfer_of(2), RuntimeError("the device is gone")
    transfer.broke(cause)
    land(transfer, 0)
    with pytest.raises(TieredKVError, match="the device is gone") as caught:
        transfer.wait()
    assert caught.value.__cause__ is cause


def test_the_first_of_several_errors_is_the_one_that_surfaces() -> None:
    transfer = transfer_of(1)
    transfer.broke(RuntimeError("first"))
    transfer.broke(RuntimeError("second"))
    land(transfer)
    with pytest.raises(TieredKVError, match="first"):
        transfer.wait()


def test_an_error_surfaces_every_time_it_is_asked_for() -> None:
    transfer = transfer_of(1)
    transfer.broke(RuntimeError("gone"))
    land(transfer)
    for _ in range(2):
        with pytest.raises(TieredKVError, match="gone"):
            transfer.wait()
        with pytest.raises(TieredKVError, match="gone"):
            transfer.wait_layer(1)


# -- layers ----------------------------------------------------------------------------------------


def test_a_layer_can_be_used_while_later_ones_are_on_their_way() -> None:
    transfer = transfer_of(2)
    transfer.sources_known()
    transfer.layer_here(0, [None])
    assert transfer.wait_layer(0) == 2
    assert not transfer.is_done
    transfer.layer_here(1, [None])
    assert transfer.wait_layer(1) == 2
    land(transfer, 0, 1)
    assert transfer.wait() == 2


def test_a_layer_is_not_given_out_while_a_source_may_still_fail() -> None:
    """The first layer of a page that will be lost must not be attended to."""
    transfer, answers = transfer_of(2), list[int]()
    transfer.layer_here(0, [None])
    thread = threading.Thread(target=lambda: answers.append(transfer.wait_layer(0)))
    thread.start()
    assert answers == []
    transfer.lost([1])
    transfer.sources_known()
    thread.join()
    assert answers == [1]


def test_a_layer_counts_the_pages_that_count_as_a_whole() -> None:
    transfer = transfer_of(3)
    transfer.lost([1])
    transfer.sources_known()
    transfer.layer_here(0, [None])
    assert transfer.wait_layer(0) == 1
    assert transfer.slots == [10]


def test_every_layer_is_there_once_all_is_settled() -> None:
    transfer = transfer_of(2)
    land(transfer, 0, 1)
    assert transfer.wait_layer(0) == transfer.wait_layer(1) == 2


def test_a_layer_that_comes_too_late_ends_the_hit() -> None:
    transfer = transfer_of(2, deadline_s=0.0)
    transfer.here([0])
    assert transfer.wait_layer(1) == 1
    assert transfer.wait() == 1


def test_a_layer_there_is_not_is_refused() -> None:
    with pytest.raises(IndexError):
        transfer_of(2).wait_layer(2)


# -- release ---------------------------------------------------------------------------------------


def test_a_lease_is_given_back_once() -> None:
    """TensorRT-LLM #12834: a double unpin freed a page that another request read."""
    released = list[tuple[Transfer, Any]]()
    transfer = transfer_of(1, release=lambda *args: released.append(args))
    transfer.release()
    transfer.release()
    assert released == [(transfer, None)]


def test_a_lease_is_given_back_after_the_readers_event() -> None:
    released, event = list[Any](), Event()
    transfer = transfer_of(1, release=lambda transfer, after: released.append(after))
    transfer.release(after=event)
    assert released == [event]


def test_leaving_the_context_gives_the_lease_back() -> None:
    released = list[Any]()
    with transfer_of(1, release=lambda *args: released.append(args)) as transfer:
        land(transfer, 0)
        assert transfer.wait() == 1
        assert released == []
    assert len(released) == 1


def test_the_lease_is_given_back_when_the_reader_fails() -> None:
    released = list[Any]()
    with pytest.raises(KeyError), transfer_of(1, release=lambda *args: released.append(args)):
        raise KeyError("the reader's own")
    assert len(released) == 1


def test_a_transfer_without_a_lease_has_nothing_to_give_back() -> None:
    transfer = transfer_of(1)
    transfer.release()
    with transfer:
        pass


# -- a put -----------------------------------------------------------------------------------------


def test_a_put_counts_the_pages_that_are_stored() -> None:
    transfer = Transfer(Plan(pages=(0, 1, 2), slots=(4, 5, 6)))
    transfer.here([0, 1])
    transfer.lost([2])
    transfer.settle()
    assert transfer.wait() == 2
    assert transfer.tiers == ()
