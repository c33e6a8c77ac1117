"""The watchdog of one agent: what is usual for each rank, and alarms when it changes."""
