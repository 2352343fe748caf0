"""`kvferry chat` answers piped lines as a session does, and tells at each switch what it took."""

import io
import re

import pytest
from small_family import FITTED, LARGE, SMALL, TEMPLATE, build_family, loaded, mapper_of

from kvferry.api import Session, load_mapper
from kvferry.api.turns import PlainTurns, TemplateTurns, turns_of
from kvferry.cli import main
from kvferry.errors import KvferryError

LIMIT = 6
FIRST, SECOND, THIRD = "When does the ferry leave?", "And the next one?", "Thanks"


@pytest.fixture(scope="module")
def results(tmp_path_factory, tiny_model, tokenizer, save_prepared, identity_mapper):
    return build_family(tmp_path_factory.mktemp("results"), tiny_model, tokenizer, save_prepared, identity_mapper)


@pytest.fixture
def chat(results, monkeypatch, capsys):
    """Pipe lines into the command; its status, stdout and stderr."""

    def run(*lines, options=(), back=True):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        arguments = ["chat", "--mapper", str(mapper_of(results, SMALL, LARGE)), "--max-new-tokens", str(LIMIT)]
        arguments += ["--back", str(mapper_of(results, LARGE, SMALL))] if back else []
        status = main([*arguments, *options])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def session(results):
    small, large = loaded(results, SMALL), loaded(results, LARGE)
    forth = load_mapper(mapper_of(results, SMALL, LARGE, FITTED), small, large)
    return Session(forth, load_mapper(mapper_of(results, LARGE, SMALL, FITTED), large, small))


def test_replies_are_those_of_a_session_that_switches_at_the_same_places(chat, session, tokenizer):
    turns, wanted, said = PlainTurns(tokenizer), [], None
    for text in (FIRST, "/switch", SECOND, "/switch", THIRD):
        if text == "/switch":
            session.switch()
            continue
        session.add(turns.following(text, said) if said else turns.opening(text))
        said = session.generate(LIMIT, stop="\n")
        wanted.append(said.text + "\n")
    status, out, _ = chat(FIRST, "/switch", SECOND, "", "/switch", THIRD)
    assert status == 0
    assert out == "".join(wanted)


@pytest.mark.parametrize("how", [("ascii", "surrogateescape"), ("utf-8", "surrogateescape"), ("utf-8", "strict")])
def test_many_lines_are_read_from_a_stream_of_bytes_whatever_its_encoding_was(how, results, monkeypatch, capsys):
    lines = io.BytesIO("Où?\n/switch\nà neuf\n".encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(lines, *how))
    arguments = ["chat", "--mapper", str(mapper_of(results, SMALL, LARGE)), "--max-new-tokens", "2"]
    assert main(arguments) == 0
    assert capsys.readouterr().err.count("goes on: ") == 1


def test_it_is_told_whose_each_reply_is(chat):
    _, _, told = chat(FIRST, "/switch", SECOND, "/switch", THIRD)
    assert re.findall(r"^\[(\S+):\]$", told, re.MULTILINE) == [SMALL, LARGE, SMALL]


def test_a_switch_tells_who_goes_on_and_what_it_took(chat, tokenizer):
    _, _, told = chat(FIRST, "/switch", SECOND, "/switch")
    found = re.findall(r"\[(\S+) goes on: (\d+) tokens mapped in [\d.]+ ms\]", told)
    prompt = len(tokenizer(f"Q: {FIRST}\nA:")["input_ids"])
    assert found[0] == (LARGE, str(prompt + LIMIT - 1))
    assert found[1][0] == SMALL
    assert len(re.findall(r"\[reading them itself would have taken [\d.]+ ms\]", told)) == 2


def test_what_reading_anew_takes_is_not_measured_if_nobody_asks(chat):
    _, out, told = chat(FIRST, "/switch", SECOND, options=["--no-compare"])
    assert "would have taken" not in told
    assert out == chat(FIRST, "/switch", SECOND)[1]


def test_without_a_way_back_the_second_switch_is_refused_and_the_talk_goes_on(chat):
    status, out, told = chat(FIRST, "/switch", "/switch", SECOND, back=False)
    assert status == 0
    assert f"[there is no mapper from {LARGE} back; give one to go on with the other model]" in told
    assert out == chat(FIRST, "/switch", SECOND)[1]


def test_quit_help_stats_and_what_is_no_command(chat):
    status, out, told = chat("/help", "/swich", FIRST, "/stats", "/quit", SECOND)
    assert status == 0
    assert len(out.splitlines()) >= 1
    assert all(f"[{command} " in told for command in ("/switch", "/stats", "/help", "/quit"))
    assert "[/swich: no command; /help lists them]" in told
    assert f"[{SMALL}: replies 1, tokens read " in told
    assert "[switches: 0, 0 tokens mapped in 0.0 ms]" in told
    assert out == chat(FIRST)[1]


def test_stats_add_up_to_the_conversation(chat):
    _, _, told = chat(FIRST, SECOND, "/switch", THIRD, "/stats")
    total = int(re.search(r"\[(\d+) tokens in the conversation", told)[1])
    (read, written), (later, last) = (
        map(int, found) for found in re.findall(r"tokens read (\d+), written (\d+)\]", told)
    )
    mapped = int(re.search(r"\[switches: 1, (\d+) tokens", told)[1])
    # what is written is read as it is written, but for the last token of a reply, which is read with what comes next
    assert total == read - 1 + written + later - 1 + last
    assert mapped == read - 1 + written - 1


def test_a_message_without_room_is_refused_and_leaves_the_conversation_as_it_was(chat):
    _, out, told = chat(FIRST, "a" * 240, SECOND)
    assert re.search(r"\[this takes \d+ tokens with its reply, and \S+ has positions for \d+ more; write less", told)
    assert out == chat(FIRST, SECOND)[1]


def test_no_lines_are_an_empty_conversation(chat):
    assert chat()[:2] == (0, "")
    assert chat("/switch", "/switch", "/stats")[0] == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--hold-back", "0"], "hold_back: 0 is too little"),
        (["--max-new-tokens", "0"], "max_new_tokens: 0 is too little"),
        (["--chat-template"], "has no chat template; go without"),
        (["--back", "/nowhere"], "/nowhere: holds no mapper"),
        (["--mapper", "/nowhere"], "/nowhere: holds no mapper"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(options, sentence, chat):
    status, out, told = chat(FIRST, options=options)
    assert (status, out) == (1, "")
    assert told.startswith("kvferry chat: ")
    assert sentence in told
    assert told.count("\n") == 1


def test_a_mapper_of_the_wrong_direction_is_no_way_back(chat, results):
    status, _, told = chat(options=["--back", str(mapper_of(results, SMALL, LARGE))])
    assert status == 1
    assert "was fitted for another source" in told


@pytest.fixture
def templated(results):
    model = loaded(results, SMALL)
    model.tokenizer.chat_template = TEMPLATE
    return model


def test_turns_of_a_template_are_together_what_it_writes_of_the_whole(templated):
    """Whether the reply came to its end token or was cut at the limit."""
    tokenizer = templated.tokenizer
    turns = turns_of(tokenizer, None)
    assert isinstance(turns, TemplateTurns)
    reply = tokenizer("At nine.")["input_ids"]
    messages = [
        {"role": "user", "content": FIRST},
        {"role": "assistant", "content": "At nine."},
        {"role": "user", "content": SECOND},
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    for ended in (reply, [*reply, tokenizer.eos_token_id]):
        tokens = [*turns.opening(FIRST), *ended, *turns.following(SECOND, said(ended, "At nine."))]
        assert tokenizer.decode(tokens) == whole


def test_plain_turns_put_each_question_on_a_line_of_its_own(tokenizer):
    turns = turns_of(tokenizer, None)
    assert isinstance(turns, PlainTurns)
    assert tokenizer.decode(turns.opening(FIRST)) == f"Q: {FIRST}\nA:"
    for text, begin in ((" At nine.\n", ""), (" At nine", "\n")):
        assert tokenizer.decode(turns.following(SECOND, said([5], text))) == f"{begin}Q: {SECOND}\nA:"


def test_a_template_that_leaves_replies_out_is_refused(templated):
    templated.tokenizer.chat_template = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(KvferryError, match="leaves earlier replies out"):
        TemplateTurns(templated.tokenizer).following(SECOND, said([5], "x"))


def said(tokens, text):
    from kvferry.api import Generation

    return Generation(tuple(tokens), text, 1, 1.0, ())
