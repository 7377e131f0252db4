"""How processes find one another, and the sockets between them. The only package with clocks and randomness."""
