"""CoQA's F1 on hand-made cases, and against precision and recall counted word by word."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.evaluate.f1 import coqa_f1, f1, words


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The white kitten.", ["white", "kitten"]),
        ("A  barn,\tnear an old house!", ["barn", "near", "old", "house"]),
        ("The-end", ["theend"]),  # punctuation goes first, so this is no article
        ("Theatre Anna", ["theatre", "anna"]),
        ("“the”", ["“", "”"]),  # only ASCII punctuation counts as such
        ("The", []),
        ("...", []),
        ("", []),
    ],
)
def test_normalised_words(answer, expected):
    assert words(answer) == expected


@pytest.mark.parametrize(
    ("reference", "answer", "expected"),
    [
        ("white", "White.", 1.0),
        ("the barn", "a barn", 1.0),
        ("in a barn", "barn", 2 / 3),  # precision 1, recall 1/2
        ("barn", "in a big barn", 1 / 2),  # precision 1/3, recall 1
        ("one one two", "one two two", 2 / 3),  # bags, not sets
        ("yes", "no", 0.0),
        ("unknown", "Unknown", 1.0),
        ("unknown", "in the barn", 0.0),
        ("unknown", "", 0.0),
        ("the", "", 1.0),  # neither has a word
        ("", "barn", 0.0),
    ],
)
def test_f1_against_one_reference(reference, answer, expected):
    assert f1(reference, answer) == pytest.approx(expected)
    assert coqa_f1([reference], answer) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("references", "answer", "expected"),
    [
        (["white", "white", "white", "white"], "white", 1.0),
        # leaving out the one right reference leaves none: 3 of 4
        (["yes", "no", "no", "no"], "yes", 3 / 4),
        (["yes", "yes", "no", "no"], "yes", 1.0),
        (["unknown", "no", "no", "unknown"], "unknown", 1.0),
        # F1 are 1, 2/3, 0: best of the rest is 2/3, 1, 1
        (["barn", "in barn", "house"], "barn", 8 / 9),
        (["yes", "no"], "yes", 1 / 2),
        (["yes", "no"], "", 0.0),
    ],
)
def test_f1_against_several_references_leaves_each_out(references, answer, expected):
    assert coqa_f1(references, answer) == pytest.approx(expected)


def counted(reference, answer):
    """F1 from precision and recall, words crossed off one by one."""
    wanted, given = words(reference), words(answer)
    left, right = list(wanted), 0
    for word in given:
        if word in left:
            left.remove(word)
            right += 1
    if not wanted and not given:
        return 1.0
    if not right:
        return 0.0
    precision, recall = right / len(given), right / len(wanted)
    return 2 * precision * recall / (precision + recall)


TEXT = st.lists(st.sampled_from(["the", "A", "barn", "Barn.", "in", "!", "old,", "unknown"]), max_size=5).map(" ".join)


@given(st.lists(TEXT, min_size=2, max_size=4), TEXT)
def test_scores_are_means_over_references_left_out(references, answer):
    best = [
        max(counted(own, answer) for at, own in enumerate(references) if at != out) for out in range(len(references))
    ]
    assert coqa_f1(references, answer) == pytest.approx(sum(best) / len(best))
    assert coqa_f1(references[:1], answer) == pytest.approx(counted(references[0], answer))
