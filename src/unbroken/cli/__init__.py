"""The `unbroken` command, one file a command."""
