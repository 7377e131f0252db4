"""What the tests of asynccoll.torch share. A folder named torch would be taken for torch where that is not installed.

Loads the scenarios before the tests: parts of torch warn of themselves when they are loaded, which would end the collection.
"""

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "processes"))  # where `scripts` is

if importlib.util.find_spec("torch") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("tests.torchbackend.everything")
