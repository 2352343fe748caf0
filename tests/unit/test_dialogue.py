"""Whatever the protocol, batch and cut, answers are those of the same tokens; nothing that comes later reaches a prompt."""

from dataclasses import dataclass, field, replace

import pytest
import torch

from kvferry.evaluate.controls import Passthrough
from kvferry.evaluate.conversations import Conversation, Turn
from kvferry.evaluate.dialogue import Voice, alternate, answers, make_dialogue, open_up
from kvferry.kv.handoff import Handoff, Native
from kvferry.kv.mapper import Affine, Mapper
from kvferry.kv.prefill import Memory, SourcePrefill

TURNS, LIMIT = 5, 6
STORIES = ("the cat in the hat", "a thin thing", "in the end, a theme: the inn")


def conversation(number, turns=TURNS + 2):
    own = [Turn(f"what is {n + number}?", (f"the {n}", "other")) for n in range(turns)]
    return Conversation(f"c{number}", "race", STORIES[number], tuple(own))


@pytest.fixture(scope="module")
def dialogues(tokenizer):
    return [make_dialogue(conversation(number), TURNS, tokenizer) for number in range(len(STORIES))]


@pytest.fixture(scope="module")
def voice(tokenizer):
    return Voice(tokenizer, LIMIT)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama", 3)


@pytest.fixture(scope="module")
def source(tiny_model):
    """Another model, of another depth and other heads."""
    return tiny_model("qwen3", 2, kv_heads=4, head_dim=4, seed=7)


def garbage(layers, kv_heads, seed):
    """A mapper that knows nothing, from rows of 16 to rows of 16."""
    torch.manual_seed(seed)
    affines = [Affine(0.5 * torch.randn(16, 16), torch.randn(16)) for _ in range(layers)]
    return Mapper([[layer % 2] for layer in range(layers)], affines, affines, kv_heads)


@pytest.fixture(scope="module")
def ways(model, source):
    """Hand-offs between two models of other shapes, there and back."""
    return Handoff(source, model, garbage(3, 2, 1)), Handoff(model, source, garbage(2, 4, 2))


def plainly(model, tokenizer, prompt):
    """Greedy decoding by whole forwards, no cache at all: the text up to a newline or the end."""
    tokens = list(prompt)
    with torch.inference_mode():
        while len(tokens) < len(prompt) + LIMIT:
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] == tokenizer.eos_token_id or "\n" in tokenizer.decode(tokens[-1:]):
                break
    return tokenizer.decode(tokens[len(prompt) :], skip_special_tokens=True).split("\n")[0].strip()


def prompt(dialogue, turn):
    return [token for span in dialogue.spans[: turn + 1] for token in span]


@pytest.fixture(scope="module")
def plain(model, dialogues, tokenizer):
    """What the model answers, by whole forwards."""
    return [tuple(plainly(model, tokenizer, prompt(own, turn)) for turn in range(TURNS)) for own in dialogues]


def test_prompts_are_story_questions_and_gold_answers_so_far(dialogues, tokenizer):
    texts = [tokenizer.decode(prompt(dialogues[0], turn)) for turn in range(3)]
    first = "the cat in the hat\n\nQ: what is 0?\nA:"
    second = first + " the 0\nQ: what is 1?\nA:"
    assert texts == [first, second, second + " the 1\nQ: what is 2?\nA:"]


def test_a_turn_is_one_line_each(tokenizer):
    own = conversation(0)
    broken = Turn("what\nis  0?", ("the\n\n0", "other"))
    dialogue = make_dialogue(replace(own, turns=(broken, *own.turns[1:])), TURNS, tokenizer)
    assert dialogue == make_dialogue(own, TURNS, tokenizer)


@pytest.mark.parametrize("which", ["question", "answer"])
@pytest.mark.parametrize("changed", range(TURNS))
def test_what_comes_later_changes_no_earlier_token_and_no_earlier_answer(
    which, changed, dialogues, tokenizer, ways, voice
):
    own = conversation(0)
    turns, old = list(own.turns), own.turns[changed]
    turns[changed] = replace(old, question="a new one?") if which == "question" else replace(old, answers=("new",))
    other = make_dialogue(replace(own, turns=tuple(turns)), TURNS, tokenizer)
    same = changed if which == "question" else changed + 1
    assert other.spans[:same] == dialogues[0].spans[:same]
    assert other.spans[same + 1 :] == dialogues[0].spans[same + 1 :]
    assert same == TURNS or other.spans[same] != dialogues[0].spans[same]
    for found, before in (
        (answers(ways[0], [other], 1, voice), answers(ways[0], dialogues[:1], 1, voice)),
        (alternate(*ways, [other], voice), alternate(*ways, dialogues[:1], voice)),
    ):
        assert found[0][:same] == before[0][:same]


def test_turns_beyond_those_asked_for_are_not_in_a_prompt(dialogues, tokenizer):
    own = conversation(0)
    assert make_dialogue(replace(own, turns=own.turns[:TURNS]), TURNS, tokenizer) == dialogues[0]
    cut = replace(own.turns[TURNS - 1], answers=("not to be seen",))
    assert make_dialogue(replace(own, turns=(*own.turns[: TURNS - 1], cut)), TURNS, tokenizer) == dialogues[0]


@pytest.mark.parametrize("hold_back", [1, 3, 40, 10**6])
def test_parts_of_a_dialogue_are_each_token_once_and_add_up_to_every_prompt(dialogues, hold_back):
    for dialogue in dialogues:
        ferried = ()
        for turn, (new, held) in enumerate(dialogue.cut(hold_back)):
            ferried += new
            assert [*ferried, *held] == prompt(dialogue, turn)
            assert len(held) == min(hold_back, len(prompt(dialogue, turn)))


@pytest.mark.parametrize("hold_back", [1, 3, 40])
def test_a_model_on_its_own_answers_as_by_whole_forwards(model, dialogues, voice, hold_back, plain):
    assert len({own for row in plain for own in row}) > TURNS
    assert answers(Native(model), dialogues, hold_back, voice) == plain


@pytest.mark.parametrize("hold_back", [1, 3, 40])
@pytest.mark.parametrize("head", [0, 2, 60])
def test_its_own_cache_handed_over_answers_the_same(model, dialogues, voice, hold_back, head, plain):
    system = Handoff(model, model, Passthrough(), head)
    assert answers(system, dialogues, hold_back, voice) == plain


@pytest.mark.parametrize("head", [0, 2, 60])
def test_two_of_the_same_that_alternate_answer_the_same(model, dialogues, voice, head, plain):
    one = Handoff(model, model, Passthrough(), head)
    assert alternate(one, one, dialogues, voice) == plain


@pytest.mark.parametrize("at", [[0], [1], [2], [2, 0], [0, 1, 2, 1]])
def test_company_changes_no_answer(ways, dialogues, voice, at, model):
    few = [dialogues[number] for number in at]
    for system in (Native(model), ways[0], replace(ways[0], native_head=5)):
        whole = answers(system, dialogues, 1, voice)
        assert answers(system, few, 1, voice) == [whole[number] for number in at]
    whole = alternate(*ways, dialogues, voice)
    assert alternate(*ways, few, voice) == [whole[number] for number in at]


@pytest.mark.parametrize("budget", [0, 10**9])
def test_a_memory_changes_no_answer_and_saves_the_second_prefill(ways, dialogues, voice, budget, monkeypatch):
    memory, count = Memory(budget), Read(monkeypatch)
    first = answers(replace(ways[0], memory=memory), dialogues, 1, voice)
    once = count.tokens
    assert once == sum(len(new) for dialogue in dialogues for new, _ in dialogue.cut(1))
    assert answers(replace(ways[0], memory=memory), dialogues, 1, voice) == first
    assert count.tokens == (once if budget else 2 * once)


class Read:
    """Counts the tokens that sources read, without padding."""

    def __init__(self, monkeypatch):
        self.tokens = 0
        read = SourcePrefill._read

        def counted(prefill, unread):
            self.tokens += sum(len(key.tokens) - key.start for key in unread)
            return read(prefill, unread)

        monkeypatch.setattr(SourcePrefill, "_read", counted)


@dataclass
class Noting:
    """A carrier that notes what it is given, by the rotary angle of each slot."""

    mapper: Mapper
    seen: list = field(default_factory=list)

    def translate(self, layers, source, target):
        self.seen.append(source.sin.shape[1])
        return self.mapper.translate(layers, source, target)


def test_each_span_is_mapped_once_and_at_its_own_length(ways, dialogues, voice):
    carrier = Noting(ways[0].mapper)
    answers(replace(ways[0], mapper=carrier), dialogues[:1], 1, voice)
    spans = [len(span) for span in dialogues[0].spans]
    assert carrier.seen == [spans[0] - 1, *spans[1:]]


def test_each_span_of_two_that_alternate_is_read_once_and_mapped_once_the_other_way(ways, dialogues, voice):
    forth, back = (replace(way, mapper=Noting(way.mapper)) for way in ways)
    calls = {}
    for role, model in (("source", forth.source), ("target", forth.target)):
        calls[role] = []
        hook = model.register_forward_pre_hook(
            lambda _, __, given, own=calls[role]: own.append(given["input_ids"].shape[1]), with_kwargs=True
        )
        calls[role + "_hook"] = hook
    try:
        alternate(forth, back, dialogues[:1], voice)
    finally:
        for role in ("source", "target"):
            calls[role + "_hook"].remove()
    spans = [len(span) for span in dialogues[0].spans]
    assert forth.mapper.seen == spans[0 : TURNS - 1 : 2]
    assert back.mapper.seen == spans[1 : TURNS - 1 : 2]
    # all else that a model reads are single tokens of answers
    assert [width for width in calls["source"] if width > 1] == spans[0::2]
    assert [width for width in calls["target"] if width > 1] == spans[1::2]


def test_the_source_answers_first_and_as_on_its_own(ways, source, dialogues, voice):
    own = answers(Native(source), dialogues, 1, voice)
    assert [row[0] for row in alternate(*ways, dialogues, voice)] == [row[0] for row in own]


def test_an_opening_serves_many_and_stays_as_it_is(ways, source, dialogues, voice):
    opening = open_up(source, dialogues, voice)
    fresh = alternate(*ways, dialogues, voice)
    for _ in range(2):
        assert alternate(*ways, dialogues, voice, opening) == fresh
    assert answers(Native(source), dialogues, 1, voice)[0][0] == opening.said[0]


def test_alternating_reads_what_the_other_wrote(ways, model, source, dialogues, voice):
    found = alternate(*ways, dialogues, voice)
    another = replace(ways[0], mapper=garbage(3, 2, 9)), ways[1]
    other = alternate(*another, dialogues, voice)
    assert [row[0] for row in found] == [row[0] for row in other]
    assert [row[1] for row in found] != [row[1] for row in other]
    another = ways[0], replace(ways[1], mapper=garbage(2, 4, 9))
    other = alternate(*another, dialogues, voice)
    assert [row[:2] for row in found] == [row[:2] for row in other]
    assert [row[2] for row in found] != [row[2] for row in other]


def test_an_answer_ends_at_the_newline_or_the_end_token(voice, tokenizer):
    assert voice._done([5, tokenizer.eos_token_id])
    assert voice._done(tokenizer("a\n")["input_ids"])
    assert not voice._done(tokenizer("a\nb")["input_ids"])
