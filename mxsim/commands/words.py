"""Words of the commands' output."""


def counted(num: int, noun: str) -> str:
    """A number and its noun, in the singular for 1.

    >>> counted(1, "step"), counted(1500, "step"), counted(2, "micro-batch")
    ('1 step', '1,500 steps', '2 micro-batches')
    """
    return f"{num:,} {noun}{'' if num == 1 else 'es' if noun.endswith('ch') else 's'}"
