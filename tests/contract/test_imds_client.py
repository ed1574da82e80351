"""The IMDS client against the fake service: answers, stale tokens, and every way it can fail."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone

import pytest

from pctool.aws.fake_imds import FakeImds
from pctool.aws.imds import (
    Imds,
    ImdsAbsentError,
    ImdsFailedError,
    ImdsRefusedError,
    ImdsSilentError,
    Notice,
)

WHEN = datetime(2030, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


@pytest.fixture
def fake() -> Iterator[FakeImds]:
    service = FakeImds()
    service.add("n1", instance_id="i-1", instance_type="p5.48xlarge", availability_zone="us-east-1a")
    yield service
    service.close()


def client(fake: FakeImds, *, timeout: float = 2.0, total: float = 4.0) -> Imds:
    return Imds(fake.endpoint("n1"), timeout=timeout, total=total)


def test_identity_notice_and_rebalance(fake: FakeImds) -> None:
    imds = client(fake)
    assert imds.instance_id() == "i-1"
    assert imds.notice() is None
    assert imds.rebalance() is None
    fake.notice("n1", action="stop", when=WHEN)
    fake.rebalance("n1")
    assert imds.notice() == Notice(action="stop", time=WHEN.timestamp())
    assert abs((imds.rebalance() or 0.0) - time.time()) < 60


def test_the_token_is_kept_and_fetched_anew_when_stale(fake: FakeImds) -> None:
    imds = client(fake)
    imds.notice()
    imds.notice()
    assert fake.requests("n1") == 3  # one token, two questions
    fake.expire_tokens("n1")
    assert imds.instance_id() == "i-1"
    assert fake.requests("n1") == 6  # 401, a new token, the answer


def test_nothing_there(fake: FakeImds) -> None:
    imds = client(fake)
    fake.remove("n1")
    with pytest.raises(ImdsAbsentError, match="cannot be reached"):
        imds.notice()


def test_token_refused(fake: FakeImds) -> None:
    fake.fault("n1", "refuse-token")
    with pytest.raises(ImdsRefusedError, match="gives no token"):
        client(fake).notice()


def test_token_refused_after_it_went_stale(fake: FakeImds) -> None:
    imds = client(fake)
    imds.notice()
    fake.expire_tokens("n1")
    fake.fault("n1", "refuse-token")
    with pytest.raises(ImdsRefusedError):
        imds.notice()


def test_500(fake: FakeImds) -> None:
    imds = client(fake)
    imds.notice()
    fake.fault("n1", "500")
    with pytest.raises(ImdsFailedError, match="500"):
        imds.notice()
    fake.fault("n1", None)
    assert imds.notice() is None


def test_hang_ends_in_time(fake: FakeImds) -> None:
    fake.fault("n1", "hang")
    with pytest.raises(ImdsSilentError, match=r"0\.2 s"):
        client(fake, timeout=0.2, total=0.3).notice()


@pytest.mark.parametrize("answer", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", b""])
def test_nonsense_is_told_from_silence(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ImdsFailedError):
            Imds(f"http://127.0.0.1:{server.getsockname()[1]}").notice()
        thread.join()
