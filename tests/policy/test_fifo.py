"""FIFO: the policy contract, and what is its own."""

from __future__ import annotations

import pytest
from contracts import PlainTree, PolicyContract

from tiered_kv.errors import ConfigError
from tiered_kv.policy import POLICIES, Policy, make
from tiered_kv.policy.fifo import Fifo


class TestFifo(PolicyContract):
    @staticmethod
    def rank(tree: PlainTree, page: int) -> int:
        return tree.came_at[page]

    def make_policy(self, tree: PlainTree) -> Policy:
        return Fifo(tree)

    def test_the_leaf_that_came_first_goes_first_however_often_it_was_used(
        self, tree: PlainTree
    ) -> None:
        for page in (0, 1, 2):
            tree.insert(page)
        tree.touch(0)
        tree.touch(0)
        assert self.victims(tree, 3) == [0, 1, 2]

    def test_a_page_that_comes_back_stands_at_the_end_again(self, tree: PlainTree) -> None:
        for page in (0, 1, 2):
            tree.insert(page)
        tree.remove(0)
        tree.insert(0)
        assert self.victims(tree, 3) == [1, 2, 0]


def test_fifo_is_found_by_its_name() -> None:
    assert isinstance(make("fifo", PlainTree()), Fifo)


def test_every_policy_that_is_listed_can_be_made() -> None:
    for name in POLICIES:
        assert isinstance(make(name, PlainTree()), Policy)


def test_an_unknown_policy_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match=r"policy='mru': there is fifo, lru"):
        make("mru", PlainTree())
