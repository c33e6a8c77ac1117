"""`unbroken cluster` and `unbroken cluster-api`: clusters of machines."""
