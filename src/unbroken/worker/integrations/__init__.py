"""Adapters for training frameworks: report steps, keep each step in memory, resume after a fault.

Each module imports its framework when it is used, and nothing else imports a framework.
"""
