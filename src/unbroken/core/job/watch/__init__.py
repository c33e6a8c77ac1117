"""Hang detection for a whole job, from the alarms and evidence of all its agents."""
