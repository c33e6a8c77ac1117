"""Tests of the views of ranks and of the past for the live page."""
