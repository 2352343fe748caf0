"""Conversations from rows of a turn each, whatever else these carry; draws that are nested and even over the domains."""

from collections import Counter

import datasets
import pytest

from kvferry.errors import KvferryError
from kvferry.evaluate.conversations import Conversation, Turn, draw_conversations, read_conversations

DOMAINS = ("cnn", "race", "wikipedia")


def row(name, number, **changes):
    doc = {
        "id": f"{name}_turn{number}",
        "source": "race",
        "story": f"Story of {name}.",
        "question": f"{name} asks {number}?",
        "answers": [f"gold {number}", f"other {number}"],
        "choices": ["poison"],
        "previous_qa": [{"question": "poison", "answer": "poison"}] * 9,
    }
    return {"doc_id": number, "doc": doc | changes}


def expected(name, turns):
    own = tuple(Turn(f"{name} asks {n}?", (f"gold {n}", f"other {n}")) for n in range(turns))
    return Conversation(name, "race", f"Story of {name}.", own)


@pytest.fixture
def wheel(tmp_path, write_wheel):
    return lambda rows: write_wheel(tmp_path / "rows.whl", {}, {"coqa/bpb_0shot": rows})


def test_rows_of_a_turn_become_conversations(wheel):
    # ten and more turns, so that an order by text would be another; ids may hold underscores
    rows = [row("a_b", n) for n in (0, 2, 1, 10, 3, 4, 5, 6, 7, 8, 9)] + [row("c", 0)]
    assert read_conversations(wheel(rows)) == [expected("a_b", 11), expected("c", 1)]


def test_nothing_of_a_row_is_read_but_its_own_turn(wheel):
    assert "poison" not in repr(read_conversations(wheel([row("a", n) for n in range(3)])))


@pytest.mark.parametrize("rows", [[row("a", 0), row("a", 2)], [row("a", 0), row("a", 1, story="Another.")]])
def test_a_conversation_in_pieces_is_refused(wheel, rows):
    with pytest.raises(KvferryError, match="conversation a lacks turns or has two stories"):
        read_conversations(wheel(rows))


HUB_ROW = {
    "id": "a",
    "source": "race",
    "story": "Story of a.",
    "questions": {"input_text": ["a asks 0?", "a asks 1?"], "turn_id": [1, 2]},
    "answers": {"input_text": ["gold 0", "gold 1"]},
    "additional_answers": {"0": {"input_text": ["other 0", "other 1"]}},
}


def test_the_hubs_rows_give_the_same(monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [HUB_ROW])
    assert read_conversations(None) == [expected("a", 2)]


SHORT = {"input_text": ["gold 0"]}


@pytest.mark.parametrize(
    "row",
    [
        OSError("no route"),
        HUB_ROW | {"answers": SHORT},
        HUB_ROW | {"answers": SHORT, "additional_answers": {}},
        {"id": "a"},
    ],
)
def test_a_hub_that_gives_something_else_is_said_so(monkeypatch, row):
    def load(*_, **__):
        if isinstance(row, Exception):
            raise row
        return [row]

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(KvferryError, match=r"evaluation\.data: CoQA \(EleutherAI/coqa\) cannot be read from the hub"):
        read_conversations(None)


def many(count=8):
    return [Conversation(f"{domain}-{n}", domain, "s" * n, ()) for n in range(count) for domain in DOMAINS]


def draw(count, seed=0, fits=lambda _: True, conversations=None):
    return draw_conversations(many() if conversations is None else conversations, count, seed, fits)


def test_a_smaller_draw_is_the_beginning_of_a_larger_one():
    whole = draw(24)
    assert len(set(whole)) == 24
    for count in range(24):
        assert draw(count) == whole[:count]


@pytest.mark.parametrize("count", [3, 7, 8, 24])
def test_a_draw_is_even_over_the_domains(count):
    drawn = Counter(conversation.domain for conversation in draw(count))
    assert max(drawn.values()) - min(drawn[domain] for domain in DOMAINS) <= 1


def test_a_seed_decides_the_draw_and_the_order_of_the_rows_does_not_mix_domains():
    assert draw(9) != draw(9, seed=1)
    assert [own.domain for own in draw(6)] == [*DOMAINS, *DOMAINS]


def test_only_what_fits_is_drawn():
    assert {len(own.story) for own in draw(9, fits=lambda own: len(own.story) < 3)} == {0, 1, 2}
    with pytest.raises(KvferryError, match=r"coqa\.conversations: 10 are asked for, 9 are long enough"):
        draw(10, fits=lambda own: len(own.story) < 3)
