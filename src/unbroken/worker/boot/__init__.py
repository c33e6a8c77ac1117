"""The start of a worker process, and the template that workers are forked from.

The worker's interpreter runs `boot.py` by its path, and `boot.py` loads the files next to it. They
use the standard library only, and none of them imports another.
"""
