"""unbroken keeps PyTorch training jobs running through failures."""

__version__ = "0.1.0"
