"""Recipes in words."""

import pytest
from test_report_inputs import recipe

from kvferry.report.labels import difference, whole


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "k=8, ridge, RoPE stripped"),
        ({"k": "all", "method": "mlp"}, "k=all, MLP, RoPE stripped"),
        ({"rope": "coupled", "method": "ols"}, "k=8, OLS, RoPE coupled"),
    ],
)
def test_the_whole_recipe(changes, words):
    assert whole(recipe(**changes)) == words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope": "not_reapplied"}, "RoPE not re-applied"),
        ({"rope": "coupled", "k": 1}, "RoPE coupled, k=1"),
        ({"rope": "coupled", "k": 1, "method": "ols", "lambda": 0.0}, "RoPE coupled, k=1, OLS"),
        ({"lambda": 1e-4, "lambda_scale": "trace"}, "λ=0.0001, λ scale trace"),
        ({"native_head": 4, "head_rows": "left_out"}, "native head 4, head rows left out"),
        ({"support": "same_head", "row_weights": "attention"}, "same head, attention-weighted rows"),
        ({"corpus": "code", "sequences": 32}, "code, 32 sequences"),
        ({"dtype": "bfloat16"}, "k=8, ridge, RoPE stripped"),
    ],
)
def test_what_differs(changes, words):
    assert difference(recipe(**changes), recipe()) == words
