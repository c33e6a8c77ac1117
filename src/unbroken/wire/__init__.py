"""What processes say to each other: values and codecs only."""
