"""`unbroken operator`: the operator as a program, and its options."""
