"""A job says a KvferryError in one sentence and hides nothing in its log; other exceptions go on as they are."""

import logging
import re
import subprocess
import sys

import pytest
import torch

from kvferry.errors import KvferryError
from kvferry.job import job


@pytest.fixture(autouse=True)
def restored():
    """Give logging and torch back as they were."""
    root, threads = logging.getLogger(), torch.get_num_threads()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers, root.level = handlers, level
    torch.set_num_threads(threads)


@pytest.fixture
def log(tmp_path):
    """A log file in a directory that is not there yet."""
    return tmp_path / "logs" / "fit.log"


def test_a_job_logs_its_begin_and_its_end(log, capsys):
    with job("fit pair", str(log)):
        pass
    begin, end = log.read_text().splitlines()
    assert re.search(r"fit pair: begins; commit \S+, \{'python': .*'torch': '.*\}", begin)
    assert re.search(r"fit pair: done in \d+\.\d s, peak memory [1-9]\d* MB", end)
    assert capsys.readouterr().err == ""


def test_a_log_holds_the_last_attempt_alone(log):
    for what in ("first", "second"):
        with job(what, str(log)):
            pass
    assert "first" not in log.read_text()


def test_a_problem_of_the_user_is_one_sentence_with_status_1_and_its_traceback_is_logged(log, capsys):
    with pytest.raises(SystemExit) as caught, job("fit pair", str(log)):
        raise KvferryError("config.yaml: k: too many; use 3")
    assert caught.value.code == 1
    assert capsys.readouterr().err == "fit pair: config.yaml: k: too many; use 3\n"
    text = log.read_text()
    assert "Traceback (most recent call last)" in text
    assert "kvferry.errors.KvferryError: config.yaml: k: too many; use 3" in text
    assert ": done in" not in text


def test_the_shell_sees_status_1_and_the_sentence_alone(log):
    script = (
        "import sys; from kvferry.job import job; from kvferry.errors import KvferryError\n"
        "with job('fit', sys.argv[1]): raise KvferryError('lambda: too small; raise it')"
    )
    done = subprocess.run([sys.executable, "-c", script, str(log)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "fit: lambda: too small; raise it\n")


@pytest.mark.parametrize("error", [ValueError("a bug"), RuntimeError("another"), AssertionError("a third")])
def test_any_other_exception_goes_on_and_is_logged(log, capsys, error):
    with pytest.raises(type(error)) as caught, job("fit", str(log)):
        raise error
    assert caught.value is error
    assert "Traceback (most recent call last)" in log.read_text()
    assert f"{type(error).__name__}: {error}" in log.read_text()
    assert capsys.readouterr().err == ""


def test_too_little_memory_is_one_sentence_with_status_1_too(log, capsys):
    with pytest.raises(SystemExit) as caught, job("evaluate", str(log)):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("evaluate: out of GPU memory (CUDA out of memory); lower evaluation.batch_tokens")
    assert said.count("\n") == 1
    assert "Traceback (most recent call last)" in log.read_text()


@pytest.mark.parametrize("threads", [1, 2])
def test_torch_computes_with_the_threads_of_the_job(log, threads):
    with job("fit", str(log), threads):
        assert torch.get_num_threads() == threads


def test_without_a_number_of_threads_torch_is_left_alone(log):
    before = torch.get_num_threads()
    with job("fit", str(log)):
        assert torch.get_num_threads() == before
