"""The machine of one job: its life, its gang of agents, its pods and ranks."""
