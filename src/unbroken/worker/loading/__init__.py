"""Data of training, with a position that is part of snapshots and checkpoints: `worker.data`.

The folder is not named `data`: `unbroken.worker` has a function of this name, and the import of a
package would replace it.
"""
