"""The machine of one agent: starts, stops and judges the workers of its pod."""
