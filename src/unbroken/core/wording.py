"""How what is told to people is put in words."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number of things: `1 agent`, `2 agents`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def all_of(number: int, noun: str) -> str:
    """Every one of so many: `the only agent`, `all 2 agents`."""
    return f"the only {noun}" if number == 1 else f"all {counted(number, noun)}"
