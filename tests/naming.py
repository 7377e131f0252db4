"""Names of test parameters that are the same in every process."""

import re


def shown(value):
    """``repr`` without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
