"""Loads the scenarios before the tests: parts of torch warn of themselves when they are loaded, which would end the collection."""

import importlib
import importlib.util
import warnings

if importlib.util.find_spec("torch") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("tests.torchbackend.everything")
