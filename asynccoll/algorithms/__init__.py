"""Collective algorithms as data: (rank, size) -> steps. Knows no bytes, ops, links, clocks or event loops."""
