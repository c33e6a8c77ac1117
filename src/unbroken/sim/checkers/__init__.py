"""Checkers of the simulated world: rules that must hold, judged by the truth."""
