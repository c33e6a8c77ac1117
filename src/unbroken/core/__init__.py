"""Every decision, as pure machines: `step(event, now) -> effects`, `deadline() -> time or None`."""
