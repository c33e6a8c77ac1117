"""Tests of what the live page shows of ranks and of the past."""
