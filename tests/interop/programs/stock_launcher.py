"""Starts HyperPod's own agent under a torch that it does not know.

From torch 2.12 on torchrun has an option `--shutdown-timeout` of its own; the agent adds one of
that name, and argparse refuses the second.  Here the second takes the place of the first.
"""

import argparse
from typing import Any

plain = argparse.ArgumentParser.__init__


def resolving(self: argparse.ArgumentParser, *arguments: Any, **options: Any) -> None:
    """Resolve conflicts as argparse does, but let the later of two options of one name count."""
    plain(self, *arguments, **{**options, "conflict_handler": "resolve"})


if __name__ == "__main__":
    argparse.ArgumentParser.__init__ = resolving
    from hyperpod_elastic_agent.run import main

    main()
