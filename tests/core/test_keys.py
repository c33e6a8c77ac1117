"""Keys that are derived from an operator's master key."""

from __future__ import annotations

import pytest

from unbroken.core.keys import (
    MASTER_BYTES,
    P256_ORDER,
    authority_number,
    derive,
    job_key,
    job_secret_name,
)

MASTER = bytes(range(MASTER_BYTES))


def test_derived_keys_stay_what_they_are() -> None:
    """Another derivation would part every operator from the agents that run."""
    assert job_key(MASTER, "uid-1").hex() == (
        "0a6146cdac1834117963677e469dc92a473ec800136b2b5cf6824e103eef4e19"
    )
    assert job_secret_name(MASTER, "lm", "uid-1") == "lm-agent-ceb836cf5ab643283dce"


def test_every_purpose_and_every_subject_has_a_key_of_its_own() -> None:
    found = {
        derive(MASTER, "a", "b"),
        derive(MASTER, "ab", ""),
        derive(MASTER, "", "ab"),
        derive(MASTER, "a", "b", block=2),
        derive(bytes(MASTER_BYTES), "a", "b"),
    }
    assert len(found) == 5


def test_the_name_of_a_secret_tells_job_uid_and_key() -> None:
    names = {
        job_secret_name(MASTER, "lm", "uid-1"),
        job_secret_name(MASTER, "lm", "uid-2"),
        job_secret_name(bytes(MASTER_BYTES), "lm", "uid-1"),
    }
    assert len(names) == 3
    assert len(job_secret_name(MASTER, "a" * 253, "uid-1")) < 253


def test_the_authority_has_a_key_of_the_curve() -> None:
    number = authority_number(MASTER)
    assert 1 <= number < P256_ORDER
    assert number != authority_number(bytes(MASTER_BYTES))


def test_a_short_master_key_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes, not 5"):
        derive(b"short", "job")
