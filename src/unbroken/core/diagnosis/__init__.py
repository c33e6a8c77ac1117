"""Diagnosis of a hang: what ranks do, who waits for whom, and who is to blame."""
