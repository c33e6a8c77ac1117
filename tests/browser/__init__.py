"""Tests of the live page in a real Chromium."""
