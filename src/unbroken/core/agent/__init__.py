"""The machine of one agent: it starts, stops and evaluates the workers of its pod."""
