"""The record of a job: conditions, timeline, traces, receipts; without secrets."""
