"""Messages between processes: values and codecs only."""
