"""Seeds of worlds that once failed, and what was wrong then.

They say what they say only as long as `testing.scenario` draws the same world for them.
"""

from __future__ import annotations

SEEDS: dict[int, str] = {}
