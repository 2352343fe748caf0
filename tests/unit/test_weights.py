"""How rows weigh: what a recipe asks for, by position and by the attention of the target."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_fits import recipe

from kvferry.errors import KvferryError
from kvferry.fit.weights import RowRule
from kvferry.kv.dump import Shard
from kvferry.kv.rope import Rotation

POSITIONS = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2, 9])


def shard_with(key_weights, value_weights):
    """A shard with weights alone, one layer, of rows at POSITIONS."""
    nothing = Rotation(torch.empty(0), torch.empty(0))
    return Shard([], [], POSITIONS, POSITIONS, POSITIONS, nothing, [key_weights], [value_weights])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"sink_positions": 9, "sink_weight": 3.0}),
        ({"row_weights": "attention"}, {"row_weights": "attention", "sink_weight": 3.0}),
        ({}, {"native_head": 4}),
        ({}, {"head_rows": "left_out"}),
        ({}, {"k": 1, "support": "same_head", "rope": "not_reapplied"}),
    ],
)
def test_recipes_that_weigh_rows_alike_have_equal_rules(one, other):
    assert RowRule.of(recipe(**one)) == RowRule.of(recipe(**other))


@pytest.mark.parametrize(
    "changes",
    [
        {"row_weights": "sink"},
        {"row_weights": "sink", "sink_positions": 2},
        {"row_weights": "sink", "sink_weight": 2.0},
        {"row_weights": "attention"},
        {"native_head": 4, "head_rows": "left_out"},
        {"native_head": 5, "head_rows": "left_out"},
    ],
)
def test_recipes_that_do_not_have_different_ones(changes):
    rules = [RowRule.of(recipe()), RowRule.of(recipe(row_weights="sink", native_head=4, head_rows="left_out"))]
    assert RowRule.of(recipe(**changes)) not in rules


@pytest.mark.parametrize(
    ("changes", "weights", "reach"),
    [
        ({}, [1] * 10, 0),
        ({"row_weights": "sink", "sink_positions": 2, "sink_weight": 3.0}, [3, 3, 1, 1, 1, 1, 3, 3, 1, 1], 2),
        ({"native_head": 3, "head_rows": "left_out"}, [0, 0, 0, 1, 1, 1, 0, 0, 0, 1], 3),
        ({"row_weights": "sink", "native_head": 1, "head_rows": "left_out"}, [0, 16, 16, 16, 1, 1, 0, 16, 16, 1], 4),
        ({"row_weights": "sink", "native_head": 6, "head_rows": "left_out"}, [0] * 9 + [1], 6),
    ],
    ids=["uniform", "sink", "left out", "sink and less left out", "sink and more left out"],
)
def test_weights_by_position(changes, weights, reach):
    rule = RowRule.of(recipe(**changes))
    assert rule.by_position(POSITIONS).tolist() == weights
    assert rule.reach == reach
    assert rule.dropped(POSITIONS) == weights.count(0)


@given(st.integers(0, 8), st.integers(0, 8), st.floats(0.5, 100))
def test_positions_from_the_reach_on_all_weigh_one(sink_positions, left_out, sink_weight):
    rule = RowRule("sink", sink_positions, sink_weight, left_out)
    assert rule.by_position(torch.arange(rule.reach, rule.reach + 5)).tolist() == [1] * 5


def test_attention_is_added_over_heads_and_is_each_kinds_own():
    key_weights, value_weights = torch.rand(10, 3), torch.rand(10, 3)
    shard = shard_with(key_weights, value_weights)
    rule = RowRule.of(recipe(row_weights="attention"))
    for kind, weights in (("k", key_weights), ("v", value_weights)):
        torch.testing.assert_close(rule.of_layer(shard, kind, 0), weights.double().sum(1))


def test_rows_that_are_left_out_weigh_nothing_whatever_their_attention():
    shard = shard_with(torch.rand(10, 3) + 1, torch.rand(10, 3) + 1)
    weights = RowRule.of(recipe(row_weights="attention", native_head=2, head_rows="left_out")).of_layer(shard, "k", 0)
    assert (weights > 0).tolist() == (POSITIONS >= 2).tolist()


def test_weights_by_position_need_no_attention():
    bare = Shard([], [], POSITIONS, POSITIONS, POSITIONS, Rotation(torch.empty(0), torch.empty(0)))
    rule = RowRule.of(recipe(row_weights="sink"))
    assert torch.equal(rule.of_layer(bare, "v", 0), rule.by_position(POSITIONS))


def test_a_dump_without_attention_weights_is_refused():
    bare = Shard([], [], POSITIONS, POSITIONS, POSITIONS, Rotation(torch.empty(0), torch.empty(0)))
    with pytest.raises(KvferryError, match="the target's dump has no attention weights; delete it and run again"):
        RowRule.of(recipe(row_weights="attention")).of_layer(bare, "k", 0)
