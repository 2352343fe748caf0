"""The command line as a whole: help at once, and every way to fail is one line and its exit status."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from small_commands import refusal, run

from kvferry import __version__
from kvferry.cli import verdict
from kvferry.cli.main import COMMANDS, main
from kvferry.errors import KvferryError


def test_help_names_every_command_and_imports_nothing_that_is_slow():
    code = (
        "import sys\nfrom kvferry.cli import main\ntry:\n main(['--help'])\nfinally:\n"
        " print([name for name in ('torch', 'transformers', 'numpy', 'pandas', 'jsonschema') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.endswith("[]\n")
    for name in COMMANDS:
        assert f"\n    {name} " in done.stdout


def test_it_can_be_run_as_a_module():
    done = subprocess.run([sys.executable, "-m", "kvferry", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"kvferry {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_says_what_it_does_with_an_example(name, capsys):
    status, out, _ = run(capsys, name, "--help")
    assert status == 0
    first = importlib.import_module(f"kvferry.cli.{name}").HELP.splitlines()[0]
    assert first in out
    assert f"  kvferry {name} " in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["required", "COMMAND", "kvferry --help"]),
        (["chek"], ["'chek'", "check"]),
        (["show"], ["ARTIFACT", "kvferry show --help"]),
        (["show", "a", "b"], ["unrecognized", "b"]),
        (["verdict", "mine", "--conf", "x"], ["unrecognized", "--conf"]),
        (["check", "one"], ["TARGET"]),
        (["new", "mine", "--source", "a"], ["--target"]),
    ],
)
def test_a_wrong_command_line_is_one_line_with_status_2(arguments, words, capsys):
    message = refusal(capsys, *arguments, status=2)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [(KvferryError("it is broken; mend it"), 1, "it is broken; mend it"), (KeyboardInterrupt(), 130, "interrupted")],
)
def test_what_a_command_raises_becomes_one_line(error, status, words, monkeypatch, capsys):
    def fail(_):
        raise error

    monkeypatch.setattr(verdict, "run", fail)
    assert refusal(capsys, "verdict", "mine", status=status) == f"kvferry verdict: {words}\n"


def test_an_error_of_our_own_making_is_not_hidden(monkeypatch):
    def fail(_):
        raise ZeroDivisionError

    monkeypatch.setattr(verdict, "run", fail)
    with pytest.raises(ZeroDivisionError):
        run(None, "verdict", "mine")


def test_a_reader_that_has_enough_ends_the_command_quietly():
    code = "import sys\nfrom kvferry.cli import main\nsys.exit(main(['verdict', 'x']))"
    patch = "from kvferry.cli import verdict\nverdict.run = lambda _: print('line\\n' * 100_000) or 0\n"
    shell = f'{sys.executable} -c "$CODE" | head -1'
    done = subprocess.run(
        ["bash", "-c", shell],
        env={"CODE": patch + code, "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "line\n"
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_that_cannot_be_written_is_said_in_one_line(tmp_path):
    code = (
        "import sys\nfrom kvferry.cli import main, verdict\nverdict.run = lambda args: print('a page') or 0\n"
        "sys.exit(main(['verdict', 'a']))"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("kvferry verdict: the disk is full")
    assert done.stderr.count("\n") == 1


def test_a_file_that_cannot_be_read_is_said_in_one_line(monkeypatch, capsys):
    def read(args):
        raise IsADirectoryError(21, "Is a directory", "weights")

    monkeypatch.setattr(verdict, "run", read)
    assert main(["verdict", "a"]) == 1
    assert capsys.readouterr().err == "kvferry verdict: weights: Is a directory\n"
