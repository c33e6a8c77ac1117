"""Tests of one machine: `python -m unbroken.nodes.checks KIND ...`, one JSON result a line.

They say what was measured and never what is done about it.  A tool or a part that is missing is
`unknown`; only what was seen to be wrong is `fail`.
"""
