"""The live page: its server, its contents, and the access to it."""
