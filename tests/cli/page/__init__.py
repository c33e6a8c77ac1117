"""Tests of the live page: its server, its contents, and the access to it."""
