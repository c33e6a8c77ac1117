"""Pickles that run a command or break the process that loads them with Python's unpickler."""

from __future__ import annotations

import os
import pickle
import struct


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: object, *given: object) -> None:
        self._what = (function, given)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self._what  # type: ignore[return-value]


def text(value: str) -> bytes:
    """A string as an opcode."""
    return b"\x8c" + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> list[bytes]:
    """A name in each of the ways in which a pickle may write it."""
    return [
        b"c" + module.encode() + b"\n" + name.encode() + b"\n",
        text(module) + text(name) + b"\x93",
    ]


def review(command: str) -> bytes:
    """The review's: `isinstance` becomes `slice` in the live dict of builtins, so that everything
    passes for a dtype; torch then looks up `os.system`."""
    return (
        b"\x80\x05"
        + (text("numpy.dtypes") + text("__builtins__") + b"\x93")
        + text("isinstance")
        + (text("builtins") + text("slice") + b"\x93")
        + b"s0"
        + (text("torch") + text("_import_dotted_name") + b"\x93")
        + (text("os.system") + b"\x85R")
        + (text(command) + b"\x85R.")
    )


def all_of(marker: str) -> list[bytes]:
    """Payloads that would make a file, and some that only cost memory or time."""
    command = f"touch {marker}"
    found = [review(command), pickle.dumps(Call(os.system, command))]
    found += [pickle.dumps(Call(os.mkdir, marker), protocol=number) for number in range(6)]
    code = f"__import__('os').system({command!r})"
    for module, name, given in (
        ("os", "system", command), ("posix", "system", command), ("builtins", "eval", code),
        ("builtins", "exec", code), ("__builtin__", "eval", code),
        ("subprocess", "getoutput", command),
        ("torch", "_import_dotted_name", "os.system"), ("numpy.dtypes", "__builtins__", ""),
        ("builtins", "getattr", ""), ("importlib", "import_module", "os"),
    ):  # fmt: skip
        for what in named(module, name):
            argument = text(given)
            found += [
                b"\x80\x04" + what + argument + b"\x85R.",  # REDUCE
                b"\x80\x04" + what + argument + b"\x85\x81.",  # NEWOBJ
                b"\x80\x04" + what + argument + b"\x85}\x92.",  # NEWOBJ_EX
                b"\x80\x04" + what + b"}" + argument + argument + b"sb.",  # BUILD
            ]
        old = module.encode() + b"\n" + name.encode() + b"\n"
        found += [b"(" + text(given) + b"i" + old + b".", b"(" + named(module, name)[0] + b"o."]
    found += [
        b"\x80\x02\x82\x01.", b"\x80\x02\x83\x01\x00.", b"\x80\x02\x84\x01\x00\x00\x00.",  # EXT
        b"P1\n.", b"\x80\x02NQ.",  # persistent IDs
        b"\x80\x05\x97.", b"\x80\x05N\x98.",  # buffers from outside
        b"Nr\xff\xff\xff\x7f.",  # a memo of 16 GiB
        b"\x8e" + struct.pack("<Q", 1 << 40) + b".", b"B\xff\xff\xff\xff.",
    ]  # fmt: skip
    return found
