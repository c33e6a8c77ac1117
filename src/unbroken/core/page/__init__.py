"""What the live page shows of a job's ranks and of its past, in bounded size.  Pure."""
