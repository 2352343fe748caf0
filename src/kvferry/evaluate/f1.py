"""CoQA's F1, as its official script `evaluate-v1.0.py` computes it. Knows strings alone.

Answers are normalised as SQuAD's: lower case, then no ASCII punctuation, then none of the words a, an, the, then split at
white space. F1 is of the two bags of words. With R > 1 references it is the mean over i of the best F1 against all references
but the i-th, which is how people are scored against each other; with one reference it is the F1 against that one. Where one
of two normalised answers has no word, F1 is 1 if neither has, else 0. `unknown`, the reference of an unanswerable
question, is a word like any other.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def words(answer: str) -> list[str]:
    """The words of a normalised answer."""
    return ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split()


def f1(reference: str, answer: str) -> float:
    """F1 of the words of an answer against one reference, 0 to 1."""
    wanted, given = words(reference), words(answer)
    if not wanted or not given:
        return float(wanted == given)
    shared = sum((Counter(wanted) & Counter(given)).values())
    # 2PR / (P + R) with precision shared/|given| and recall shared/|wanted|.
    return 2 * shared / (len(wanted) + len(given))


def coqa_f1(references: Sequence[str], answer: str) -> float:
    """F1 against several references: the mean, over references left out, of the best against the rest."""
    scores = [f1(reference, answer) for reference in references]
    if len(scores) == 1:
        return scores[0]
    best = [max(scores[:out] + scores[out + 1 :]) for out in range(len(scores))]
    return sum(best) / len(best)
