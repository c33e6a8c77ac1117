"""Evidence about workers: their pages, output, stacks, /proc, and collectives."""
