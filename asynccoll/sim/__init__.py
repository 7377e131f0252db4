"""The other driver: the same engine over an in-memory network, in virtual time where the loop has it."""
