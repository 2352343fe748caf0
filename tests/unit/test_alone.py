"""One holder at a time; and the lock is free as soon as its holder is gone, however it went."""

import signal
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "kvferry.alone"]
WAITING = [sys.executable, "-c", "print('held', flush=True); import time; time.sleep(60)"]


@pytest.fixture
def lock(tmp_path):
    """A lock file that is not there yet."""
    return str(tmp_path / "lock")


@pytest.fixture
def holder(lock):
    """A process that holds the lock, and became the command that it was given."""
    process = subprocess.Popen([*COMMAND, lock, *WAITING], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def attempt(lock, *command):
    return subprocess.run([*COMMAND, lock, *command], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("status", [0, 7])
def test_the_command_runs_with_its_arguments_and_its_own_exit_status(lock, status):
    done = attempt(
        lock, sys.executable, "-c", "import sys; print(sys.argv[1]); sys.exit(int(sys.argv[2]))", "a b", str(status)
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "a b\n", "")


def test_a_second_holder_is_refused_with_a_sentence(lock, holder):
    done = attempt(lock, sys.executable, "-c", "print('ran')")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"another run holds {lock}: wait until it ends, or stop it\n"
    assert holder.poll() is None


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_is_free_again_once_the_holder_is_killed(lock, holder, ending):
    assert attempt(lock, "true").returncode == 1
    holder.send_signal(ending)
    assert holder.wait() == -ending
    assert attempt(lock, "true").returncode == 0


def test_another_lock_is_not_held(lock, holder):
    assert attempt(f"{lock}-other", "true").returncode == 0


def test_a_run_that_ended_leaves_the_lock_free(lock):
    assert [attempt(lock, "true").returncode for _ in range(2)] == [0, 0]
