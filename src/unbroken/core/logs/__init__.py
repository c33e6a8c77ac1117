"""Log rules: read, checked, and applied to live output or to recorded logs."""
