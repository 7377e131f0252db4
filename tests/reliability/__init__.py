"""Commands that give the figures of reliability, each with a short form in the suite. See `common`."""
