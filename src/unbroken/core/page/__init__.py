"""Views of a job's ranks and of its past in bounded size, for the live page.  Pure."""
