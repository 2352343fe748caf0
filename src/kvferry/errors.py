"""The one exception that carries a message for people: what is wrong, where, what to do. Knows nothing else."""


class KvferryError(Exception):
    """A problem that the user can mend, said in one sentence."""


def first_line(error: BaseException) -> str:
    """What an error of a library says first, or else its type, to stand in a sentence of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
