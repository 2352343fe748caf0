"""`kvferry generate` writes the target's continuation to stdout and the times to stderr; what is wrong is one line."""

import io
import shutil

import pytest
import torch
from small_family import EXACT, FITTED, HEADED, LARGE, SMALL, TEMPLATE, TEXT, build_family, counted, loaded, mapper_of

from kvferry.api import Handoff
from kvferry.cli import main
from kvferry.cli.generate import read_prompt, warm_up


@pytest.fixture(scope="module")
def results(tmp_path_factory, tiny_model, tokenizer, save_prepared, identity_mapper):
    return build_family(tmp_path_factory.mktemp("results"), tiny_model, tokenizer, save_prepared, identity_mapper)


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def generate(results, prompt_file, capsys):
    """Run the command; its status, stdout and stderr."""

    def run(*options, mapper=None, file=prompt_file):
        mapper = mapper or mapper_of(results, SMALL, LARGE)
        status = main(["generate", "--mapper", str(mapper), "--prompt-file", str(file), *options])
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def handoff(results):
    return Handoff(loaded(results, SMALL), loaded(results, LARGE), mapper_of(results, SMALL, LARGE))


@pytest.mark.parametrize("hold_back", [1, 7])
def test_the_continuation_is_that_of_the_hand_off(hold_back, generate, handoff):
    status, out, _ = generate("--hold-back", str(hold_back), "--max-new-tokens", "9")
    assert status == 0
    assert out == handoff.generate(TEXT, 9, hold_back=hold_back).text + "\n"


def test_the_time_of_each_step_is_told(generate, handoff):
    tokens = len(handoff.source.tokenizer(TEXT)["input_ids"])
    _, _, told = generate("--hold-back", "3", "--max-new-tokens", "5")
    lines = told.splitlines()
    assert len(lines) == 4
    for line, step, count in zip(
        lines,
        (f"{SMALL} reads the prompt", "the mapper ferries its cache", f"{LARGE} reads what is held back"),
        (tokens - 3, tokens - 3, 3),
        strict=False,
    ):
        assert line.startswith(step)
        assert line.split()[-2:] == [str(count), "tokens"]
    assert lines[3].startswith(f"{LARGE} writes")


def test_an_exact_mapper_agrees_with_the_target_alone(generate, results):
    status, out, told = generate("--compare", "--max-new-tokens", "6", mapper=mapper_of(results, LARGE, LARGE, EXACT))
    assert status == 0
    assert f"tokens that are the same at the beginning: 6; {LARGE} alone writes:\n{out}" in told
    assert f"{LARGE} reads the whole prompt" in told
    assert "to the first token: " in told


def test_a_fitted_mapper_is_compared_with_what_the_target_alone_writes(generate, handoff):
    _, out, told = generate("--compare", "--max-new-tokens", "6")
    own = handoff.alone(TEXT, 6)
    assert told.endswith(f"alone writes:\n{own.text}\n")
    assert out != own.text + "\n"


@pytest.mark.parametrize("variant", [FITTED, HEADED])
def test_the_mapper_is_warm_before_it_is_timed(variant, results):
    handoff = Handoff.load(mapper_of(results, SMALL, LARGE, variant))
    handoff.mapper = counted(handoff.mapper)
    warm_up(handoff)
    assert sum(handoff.mapper.mapper.spans) > 0


def test_the_prompt_may_come_from_stdin(generate, handoff, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    assert generate("--max-new-tokens", "4", file="-")[1] == handoff.generate(TEXT, 4).text + "\n"


def test_the_line_break_that_ends_a_file_is_no_part_of_the_prompt(generate, prompt_file):
    without = generate("--max-new-tokens", "4")
    prompt_file.write_text(TEXT + "\n")
    assert generate("--max-new-tokens", "4")[:2] == without[:2]
    assert read_prompt(str(prompt_file)) == TEXT


def test_threads_are_those_that_are_asked_for(generate):
    before = torch.get_num_threads()
    try:
        assert generate("--max-new-tokens", "1", "--threads", str(before + 1))[0] == 0
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_models_may_be_given(generate, results, handoff, tmp_path):
    mapper = shutil.copytree(mapper_of(results, SMALL, LARGE), tmp_path / "mapper")
    given = [
        word
        for role, name in (("source", SMALL), ("target", LARGE))
        for word in (f"--{role}", str(results / "models" / name))
    ]
    assert generate("--max-new-tokens", "4", *given, mapper=mapper)[1] == handoff.generate(TEXT, 4).text + "\n"


def test_a_chat_template_wraps_the_text_as_a_users_message(generate, handoff, results):
    template = results / "models" / LARGE / "chat_template.jinja"
    template.write_text(TEMPLATE)
    try:
        out = generate("--chat-template", "--max-new-tokens", "4")[1]
    finally:
        template.unlink()
    written = f"<bos>user\n{TEXT}<eos>\n<bos>assistant\n"
    tokens = handoff.target.tokenizer(written, add_special_tokens=False)["input_ids"]
    assert tokens[0] == 1
    assert out == handoff.generate(tokens, 4).text + "\n"


def wrong(results, tmp_path):
    """Options that are wrong, and what is said of them."""
    empty, bytes_file = tmp_path / "empty.txt", tmp_path / "bytes.txt"
    empty.write_text(" \n")
    bytes_file.write_bytes(b"\xff\xfe\xff")
    models = results / "models"
    copied = shutil.copytree(mapper_of(results, SMALL, LARGE), tmp_path / "copied", dirs_exist_ok=True)
    return [
        ({"mapper": copied}, [], f"copied: lies outside the results of a run, so its source {SMALL} has to be named"),
        ({"mapper": tmp_path}, [], "holds no mapper (no manifest.json)"),
        ({"mapper": tmp_path / "nowhere"}, [], "holds no mapper (no manifest.json)"),
        ({"file": tmp_path / "none.txt"}, [], "none.txt: there is no such file; give one with the prompt"),
        ({"file": bytes_file}, [], "bytes.txt: unreadable prompt"),
        ({"file": tmp_path}, [], "unreadable prompt (Is a directory)"),
        ({"file": empty}, [], "empty.txt: the prompt is empty"),
        ({}, ["--hold-back", "0"], "hold_back: 0 is too little"),
        ({}, ["--threads", "0"], "threads: 0 is too little"),
        ({}, ["--max-new-tokens", "-1"], "max_new_tokens: -1 is too little"),
        ({}, ["--max-new-tokens", "250"], "tokens are more than the 256 positions"),
        ({}, ["--source", str(models / LARGE)], "was fitted for another source"),
        ({}, ["--target", str(models / SMALL)], "was fitted for another target"),
        ({}, ["--target", "nowhere"], "nowhere: is no directory"),
        ({}, ["--device", "cdua"], "device: 'cdua' is no device of torch"),
        ({}, ["--dtype", "int3"], "dtype: 'int3' is not known"),
        ({}, ["--chat-template"], "has no chat template"),
    ]


@pytest.mark.parametrize("number", range(17))
def test_what_is_wrong_is_said_in_one_line(number, generate, results, tmp_path):
    given, options, sentence = wrong(results, tmp_path)[number]
    status, out, told = generate(*options, **given)
    assert (status, out) == (1, "")
    assert told.startswith("kvferry generate: ")
    assert sentence in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    "options", [[], ["--mapper", "m"], ["--mapper", "m", "--prompt-file", "p", "--raw", "--chat-template"]], ids=len
)
def test_a_wrong_command_line_has_the_status_of_one(options, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["generate", *options])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
