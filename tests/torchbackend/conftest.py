"""What the tests of asynccoll.torch share. A folder named torch would be taken for torch where that is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "processes"))  # where `scripts` is
