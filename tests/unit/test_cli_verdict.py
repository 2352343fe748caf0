"""`kvferry verdict`: the page as the run wrote it, or what to do to have one."""

from pathlib import Path

import pytest
from small_commands import refusal, run
from small_models import checkout as checkout_at

PAGE = Path("results/verdict/24l-to-30l.md")
TEXT = "# 24l-to-30l: use it — 97 %\n\nRetention ≥ 95 %.\n"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout as the working directory."""
    monkeypatch.chdir(tmp_path)
    return checkout_at(tmp_path)


def write(page):
    page.parent.mkdir(parents=True)
    page.write_text(TEXT, encoding="utf-8")


def test_the_page_is_printed_as_it_is(checkout, capsys):
    write(PAGE)
    assert run(capsys, "verdict", "24l-to-30l") == (0, TEXT, "")


def test_the_page_of_another_run_is_found_by_its_config(checkout, capsys):
    write(Path("results/ci/verdict/24l-to-30l.md"))
    assert run(capsys, "verdict", "24l-to-30l", "--config", "config/ci.yaml") == (0, TEXT, "")


def page_as_a_folder():
    PAGE.mkdir(parents=True)


def page_of_other_bytes():
    PAGE.parent.mkdir(parents=True)
    PAGE.write_bytes(b"\xff\xfe\xfd")


@pytest.mark.parametrize(
    ("prepare", "arguments", "words"),
    [
        (None, ["24l-to-30l"], [str(PAGE), "make demo CONFIG=config/config.yaml"]),
        (None, ["24l-to-31l"], ["config/config.yaml", "'24l-to-31l'", "'24l-to-30l'"]),
        (None, ["20l-to-30l"], ["config/config.yaml", "'20l-to-30l'"]),  # in the registry, not in the run
        (None, ["a", "--config", "config/absent.yaml"], ["config/absent.yaml", "No such file"]),
        (None, ["a", "--config", "config/models.yaml"], ["config/models.yaml", "unknown key"]),
        (page_as_a_folder, ["24l-to-30l"], [str(PAGE), "unreadable"]),
        (page_of_other_bytes, ["24l-to-30l"], [str(PAGE), "unreadable"]),
    ],
)
def test_where_there_is_no_page_one_sentence_says_why(checkout, prepare, arguments, words, capsys):
    if prepare:
        prepare()
    message = refusal(capsys, "verdict", *arguments)
    for word in words:
        assert word in message


def test_outside_a_checkout_it_is_said_where_to_go(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    message = refusal(capsys, "verdict", "24l-to-30l")
    assert "no checkout" in message
    assert str(tmp_path) in message
