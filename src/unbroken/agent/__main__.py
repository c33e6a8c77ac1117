"""`python -m unbroken.agent`."""

from __future__ import annotations

from .main import script

script()
