"""In-process restart: leave a function when another rank fails, and call it again."""
