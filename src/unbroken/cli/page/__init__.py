"""The live page: its server, what it shows, and who may see it."""
