"""The one exception that carries a message for people: what is wrong, where, what to do. Knows nothing else."""


class KvferryError(Exception):
    """A problem that the user can mend, said in one sentence."""
