"""`asynccoll soak`: random programs under random faults, one seed each, with every result and every error checked."""
