"""Recovery of a job: signals of a fault, incidents, remedies, restart budgets."""
