"""Workers on Python 3.9 get the same from the functions that stand for newer ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.wire.compat import _zip_equal, zip_equal

ROWS = st.lists(st.lists(st.integers() | st.none(), max_size=3), min_size=2, max_size=3)


@given(ROWS)
def test_both_forms_are_zip_with_strict(rows: list[list[int | None]]) -> None:
    try:
        expected = list(zip(*rows, strict=True))
    except ValueError:
        for form in (_zip_equal(rows), zip_equal(*rows)):  # type: ignore[call-overload]
            with pytest.raises(ValueError, match=r"length|shorter|longer"):
                list(form)
    else:
        assert list(_zip_equal(rows)) == expected == list(zip_equal(*rows))  # type: ignore[call-overload]
