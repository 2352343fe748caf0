"""Bars are for people: on a terminal, after a moment, with an estimate; nothing in a log."""

import io

from kvferry import progress
from kvferry.progress import BYTES, bar, track


class Terminal(io.StringIO):
    def isatty(self):
        return True


def written_to(monkeypatch, stream, seconds=0):
    """A stream in place of stderr, within the test itself: pytest sets its own before that."""
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(progress, "SECONDS", seconds)
    return stream


def test_nothing_is_written_into_a_log(monkeypatch):
    log = written_to(monkeypatch, io.StringIO())
    with bar(3, "read") as own:
        own.update(3)
    assert list(track([1, 2], "read")) == [1, 2]
    assert log.getvalue() == ""


def test_a_terminal_shows_what_is_done_and_how_much_there_is(monkeypatch):
    terminal = written_to(monkeypatch, Terminal())
    with bar(4, "read", "doc") as own:
        own.update(4)
    assert "read: 100%" in terminal.getvalue()
    assert "4/4" in terminal.getvalue()


def test_bytes_are_shown_in_multiples(monkeypatch):
    terminal = written_to(monkeypatch, Terminal())
    with bar(5_000_000, "check", BYTES) as own:
        own.update(5_000_000)
    assert "5.00M/5.00M" in terminal.getvalue()


def test_what_is_done_in_a_moment_shows_no_bar(monkeypatch):
    terminal = written_to(monkeypatch, Terminal(), seconds=60)
    assert list(track(range(3), "read")) == [0, 1, 2]
    assert "read" not in terminal.getvalue()
