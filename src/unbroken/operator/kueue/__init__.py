"""Jobs in Kueue's queues: the Workload of each job, written and obeyed."""
