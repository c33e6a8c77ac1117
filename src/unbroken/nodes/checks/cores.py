"""Every processor computes what is known to the last bit; one that computes otherwise is named.

The answers are constants of this file, so that one core alone can be judged. Integers, hashes and
compression have one answer by nature. Floating point has one as long as only operations are used
that IEEE 754 rounds exactly (+ - * / and the square root), one at a time, as Python does.
"""

from __future__ import annotations

import hashlib
import math
import os
import zlib
from collections.abc import Callable, Iterator
from functools import partial

from unbroken.kube.clock import monotonic

from .findings import CheckSettings, Finding, Test, failed, passed, unknown
from .sides import at_each

CHAIN = 400
NAMED_MAX = 8


def _integers() -> str:
    """Products and remainders of long numbers."""
    modulus, value = 2**2203 - 1, 3
    for _ in range(CHAIN // 8):
        value = pow(value, 65537, modulus) ^ 0x5A5A
    return hashlib.sha256(value.to_bytes(276, "big")).hexdigest()[:16]


def _hashes() -> str:
    """Additions, rotations and the processor's own instructions for hashes."""
    block = b"unbroken" * 512
    for _ in range(CHAIN // 8):
        block = (hashlib.sha512(block).digest() + hashlib.blake2b(block).digest()) * 32
        block += zlib.crc32(block).to_bytes(4, "big") + hashlib.sha256(block).digest()
    return hashlib.sha256(block).hexdigest()[:16]


def _floats() -> str:
    """A chaotic sequence: one wrong bit anywhere changes all that follows."""
    x, y = 0.37, 1.0
    for _ in range(CHAIN * 20):
        x = 3.99 * x * (1.0 - x)
        y = math.sqrt(y + x) / (1.0 + x)
    return f"{x.hex()} {y.hex()}"


def _compression() -> str:
    """Branches and copies: text that is packed and unpacked."""
    digests = (hashlib.sha256(bytes([n])).hexdigest().encode() for n in range(96))
    text = b"".join(digest * (n % 7 + 1) for n, digest in enumerate(digests))
    for _ in range(CHAIN // 80):
        packed = zlib.compress(text, 9)
        if zlib.decompress(packed) != text:
            return "not what was packed"
        text = text[1:] + text[:1]
    return hashlib.sha256(text).hexdigest()[:16]


ANSWERS: tuple[tuple[Callable[[], str], str], ...] = (
    (_integers, "44f5a48ebbc79750"),
    (_hashes, "da21b005e9d1ad8a"),
    (_floats, "0x1.3f7c2f4b8e46bp-1 0x1.6a042efa7d78dp-1"),
    (_compression, "c172f290156f279e"),
)
"""Computations and their results (by this code, under CPython 3.11 on x86-64)."""


def _compute(processor: int, settings: CheckSettings) -> tuple[int, str]:
    """Rounds that were computed, and what was wrong; empty: nothing."""
    os.sched_setaffinity(0, {processor})
    rounds, end = 0, monotonic() + settings.seconds
    is_planted = settings.plants.number("wrong-core") == processor
    while not rounds or monotonic() < end:
        for work, answer in ANSWERS:
            got = work()
            if is_planted and rounds == 0:
                got = got[:-1] + ("0" if got[-1] != "0" else "1")
            if got != answer:
                name = work.__name__.strip("_")
                return rounds, f"{name} of round {rounds}: {got} instead of {answer}"
        rounds += 1
    return rounds, ""


def arithmetic(settings: CheckSettings) -> Iterator[Finding]:
    """All processors compute at once, each bound to its own."""
    places = sorted(os.sched_getaffinity(0))
    wrong, silent, rounds = [], [], 0
    for processor, answer in at_each(places, partial(_compute, settings=settings)):
        if isinstance(answer, str):
            silent.append(f"processor {processor}: {answer}")
        elif answer[1]:
            wrong.append(f"processor {processor} computes wrongly: {answer[1]}")
        else:
            rounds += answer[0]
    if wrong:
        yield failed("cpu-arithmetic", "; ".join(wrong[:NAMED_MAX]))
    elif silent:
        yield unknown("cpu-arithmetic", "; ".join(silent[:NAMED_MAX]))
    else:
        text = f"{len(places)} processors computed the same"
        yield passed("cpu-arithmetic", text, rounds, "rounds")


TESTS = (Test("cpu-arithmetic", arithmetic),)
