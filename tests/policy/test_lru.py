"""LRU: the policy contract, and what is its own."""

from __future__ import annotations

import pytest
from contracts import PlainTree, PolicyContract

from tiered_kv.policy import Policy, base, make
from tiered_kv.policy.lru import Lru


class TestLru(PolicyContract):
    @staticmethod
    def rank(tree: PlainTree, page: int) -> int:
        return tree.used_at[page]

    def make_policy(self, tree: PlainTree) -> Policy:
        return Lru(tree)

    def test_the_least_recently_used_leaf_goes_first(self, tree: PlainTree) -> None:
        for page in (0, 1, 2):
            tree.insert(page)
        tree.touch(0)
        tree.touch(1)
        assert self.victims(tree, 3) == [2, 0, 1]

    def test_a_touch_after_the_victims_were_named_counts_the_next_time(
        self, tree: PlainTree
    ) -> None:
        for page in (0, 1, 2):
            tree.insert(page)
        assert self.victims(tree, 1) == [0]
        tree.touch(0)
        assert self.victims(tree, 3) == [1, 2, 0]

    def test_an_old_parent_goes_before_a_younger_leaf_elsewhere(self, tree: PlainTree) -> None:
        tree.path(0, 1)
        tree.insert(2)
        assert self.victims(tree, 3) == [1, 0, 2]

    def test_a_hint_moves_a_page_up_or_down_and_can_be_taken_back(self, tree: PlainTree) -> None:
        for page in (0, 1, 2, 3):
            tree.insert(page)
        tree.hint(0, 2)
        tree.hint(3, -9)
        assert self.victims(tree, 4) == [3, 1, 0, 2]
        tree.hint(0, 0)
        tree.hint(3, 0)
        assert self.victims(tree, 4) == [0, 1, 2, 3]

    def test_a_hint_on_a_parent_does_not_let_it_go_before_its_child(self, tree: PlainTree) -> None:
        tree.path(0, 1)
        tree.insert(2)
        tree.hint(0, -9)
        assert self.victims(tree, 3) == [1, 0, 2]

    def test_pages_hinted_to_go_first_go_by_number_in_a_run_too(
        self, tree: PlainTree, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No rank is below 0, so that of 9 is not below that of 5."""
        monkeypatch.setattr(base, "LONG", 1)
        monkeypatch.setattr(base, "FEW", 1)
        tree.path(8, 9, 2, 1)
        tree.insert(5)
        for page in (8, 9, 2, 1, 5):
            tree.hint(page, -99)
        assert self.victims(tree, 5) == [1, 2, 5, 9, 8]


def test_lru_is_found_by_its_name() -> None:
    assert isinstance(make("lru", PlainTree()), Lru)
