"""What tests of the command line share: a run of a command, and the refusal of one: one sentence, no traceback."""

from kvferry.cli import main


def run(capsys, *arguments):
    """(status, what is printed, what is said on stderr) of a command."""
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as stop:  # argparse
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def refusal(capsys, *arguments, status=1):
    """The one sentence on stderr of a command that fails with this status."""
    found, out, err = run(capsys, *arguments)
    assert found == status, err
    assert out == ""
    assert err.startswith("kvferry")
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    return err
