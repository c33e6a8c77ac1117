"""`unbroken rules`: a workbench for log rules."""
