"""Puts this directory on the path, so that the tests below it find `wires` too."""
