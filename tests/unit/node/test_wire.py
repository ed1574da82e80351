"""Framing and proofs of the launches' channel."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pctool.node import wire

MESSAGES = st.lists(
    st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=20) | st.floats(allow_nan=False))
)


@given(MESSAGES, st.integers(1, 50))
def test_messages_survive_any_cutting_of_the_stream(messages: list[wire.Message], size: int) -> None:
    stream = b"".join(map(wire.encode, messages))
    lines = wire.Lines()
    got = [m for at in range(0, len(stream), size) for m in lines.feed(stream[at : at + size])]
    assert got == messages


def test_an_endless_line_and_what_is_no_object_are_refused() -> None:
    with pytest.raises(wire.WireError, match="more than 10 bytes"):
        list(wire.Lines().feed(b"x" * 11, limit=10))
    with pytest.raises(wire.WireError, match="more than 10 bytes"):
        list(wire.Lines().feed(b'{"x":"123456"}\n', limit=10))  # whole, but no less too long
    for line in (b"[1]\n", b"{\n", b"\xff\n", b"[" * 5000 + b"\n"):
        with pytest.raises(wire.WireError):
            list(wire.Lines().feed(line))


def test_a_proof_holds_only_for_its_nonce_role_and_parts() -> None:
    good = {"proof": wire.proof("nonce", "peer", "c1", 3, "c2")}
    assert wire.proved(good, wire.proof("nonce", "peer", "c1", 3, "c2"))
    for other in (("other", "peer", "c1", 3), ("nonce", "hub", "c1", 3), ("nonce", "peer", "c1", 4)):
        nonce, role, *parts = other
        assert not wire.proved(good, wire.proof(str(nonce), str(role), *parts, "c2"))
    assert not wire.proved({"proof": 5}, "x")
    assert not wire.proved({"proof": "\ud800"}, "x")
    assert not wire.proved({"proof": "\xe9"}, "x")
    assert not wire.proved({}, "x")


@pytest.mark.parametrize("text", ["", "host", ":1", "h:", "h:0", "h:65536", "h:x"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        wire.split_address(text)


def test_addresses() -> None:
    assert wire.split_address("10.0.0.1:4000") == ("10.0.0.1", 4000)
    assert wire.split_address("[fd00::1]:4000") == ("fd00::1", 4000)
