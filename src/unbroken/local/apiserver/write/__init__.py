"""The write path: create, update, patch, apply, delete, admission, defaults."""
