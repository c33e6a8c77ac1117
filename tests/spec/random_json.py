"""JSON of any form, for readers that must refuse what they cannot follow."""

from __future__ import annotations

from hypothesis import strategies as st

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    SCALARS | st.integers(10**30, 10**31).map(lambda n: n**200),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | SCALARS, inner)
    ),
    max_leaves=12,
)
"""Also with keys that are no texts, as YAML has them, and with integers of 6,000 digits."""
