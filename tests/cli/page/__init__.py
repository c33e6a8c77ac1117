"""Tests of the live page: its server, its contents, who may see it."""
