"""Auto-resume of jobs after the loss of a node or a pod, one program for each kind."""
