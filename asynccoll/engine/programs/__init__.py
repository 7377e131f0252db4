"""Programs: what one rank does in one operation, as generators of transfers. They know values, not frames or sockets."""
