"""`unbroken top`: jobs, ranks and nodes, live in a terminal."""
