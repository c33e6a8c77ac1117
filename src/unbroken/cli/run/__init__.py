"""`unbroken run`: starts a job from a manifest or a script, and follows it."""
