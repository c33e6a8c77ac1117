"""`unbroken rules`: tests and checks of log rules."""
