"""Numbers in words, as people write them in English."""

from __future__ import annotations

from typing import Final

from training.nano.lexicon import words

_SMALL: Final = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS: Final = words("twenty thirty forty fifty sixty seventy eighty ninety")


def spelled(number: int) -> str:
    """A number from 0 to 999.

    >>> spelled(347)
    'three hundred and forty-seven'
    """
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_SMALL[ones]}" if ones else "")
    hundreds, rest = divmod(number, 100)
    return f"{_SMALL[hundreds]} hundred" + (f" and {spelled(rest)}" if rest else "")
