"""Checkpoints on disk: written while training continues, verified, complete or absent.

The folder is not named `checkpoint` or `checkpoints`: `unbroken.worker` has functions of these
names, and the import of a package would replace them.
"""
