"""The fake IMDS keeps IMDSv2's rules; the same requests can be sent to the real service by hand."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from urllib.parse import urlsplit

import pytest

from pctool.aws.fake_imds import FakeImds

META = "/latest/meta-data/"


@pytest.fixture
def imds() -> Iterator[FakeImds]:
    fake = FakeImds()
    fake.add("n1", instance_id="i-1", instance_type="p5.48xlarge", availability_zone="us-east-1a")
    yield fake
    fake.close()


def ask(endpoint: str, method: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=5)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def token(endpoint: str, ttl: str = "60") -> str:
    status, text = ask(endpoint, "PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": ttl})
    assert status == 200
    return text


def get(endpoint: str, path: str, held: str) -> tuple[int, str]:
    return ask(endpoint, "GET", META + path, {"X-aws-ec2-metadata-token": held})


def test_a_request_without_a_token_or_with_a_stranger_one_is_401(imds: FakeImds) -> None:
    endpoint = imds.endpoint("n1")
    assert ask(endpoint, "GET", META + "instance-id")[0] == 401
    assert get(endpoint, "instance-id", "made-up")[0] == 401


@pytest.mark.parametrize("ttl", ["0", "21601", "", "x"])
def test_a_ttl_out_of_bounds_is_400(imds: FakeImds, ttl: str) -> None:
    headers = {"X-aws-ec2-metadata-token-ttl-seconds": ttl}
    assert ask(imds.endpoint("n1"), "PUT", "/latest/api/token", headers)[0] == 400


def test_the_identity_of_a_node(imds: FakeImds) -> None:
    endpoint = imds.endpoint("n1")
    held = token(endpoint)
    assert get(endpoint, "instance-id", held) == (200, "i-1")
    assert get(endpoint, "instance-type", held) == (200, "p5.48xlarge")
    assert get(endpoint, "placement/availability-zone", held) == (200, "us-east-1a")
    assert get(endpoint, "placement/region", held) == (200, "us-east-1")
    assert get(endpoint, "local-ipv4", held) == (200, "127.0.0.1")
    assert get(endpoint, "no/such", held)[0] == 404


def test_notice_and_rebalance_appear_and_go(imds: FakeImds) -> None:
    endpoint = imds.endpoint("n1")
    held = token(endpoint)
    assert get(endpoint, "spot/instance-action", held)[0] == 404
    imds.notice("n1", when=datetime(2030, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=1))))
    imds.rebalance("n1")
    status, text = get(endpoint, "spot/instance-action", held)
    assert (status, json.loads(text)) == (200, {"action": "terminate", "time": "2030-01-02T02:04:05Z"})
    assert "noticeTime" in json.loads(get(endpoint, "events/recommendations/rebalance", held)[1])
    imds.clear("n1")
    assert get(endpoint, "spot/instance-action", held)[0] == 404
    assert get(endpoint, "events/recommendations/rebalance", held)[0] == 404


def test_expired_tokens_are_401_and_a_new_one_works(imds: FakeImds) -> None:
    endpoint = imds.endpoint("n1")
    held = token(endpoint)
    imds.expire_tokens("n1")
    assert get(endpoint, "instance-id", held)[0] == 401
    assert get(endpoint, "instance-id", token(endpoint)) == (200, "i-1")


def test_faults_and_their_healing(imds: FakeImds) -> None:
    endpoint = imds.endpoint("n1")
    held = token(endpoint)
    imds.fault("n1", "500")
    assert get(endpoint, "instance-id", held)[0] == 500
    imds.fault("n1", "refuse-token")
    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    assert ask(endpoint, "PUT", "/latest/api/token", ttl)[0] == 403
    imds.fault("n1", "hang")
    host, port = urlsplit(endpoint).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=0.2) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(TimeoutError):
            connection.recv(1)
    imds.fault("n1", None)
    assert get(endpoint, "instance-id", held) == (200, "i-1")


def test_a_removed_node_refuses_and_the_others_stay(imds: FakeImds) -> None:
    gone = imds.endpoint("n1")
    other = imds.add("n2", instance_id="i-2", instance_type="p5.48xlarge", availability_zone="us-east-1b")
    host, port = urlsplit(gone).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as open_one:
        imds.remove("n1")
        assert open_one.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        ask(gone, "GET", "/")
    assert get(other, "instance-id", token(other)) == (200, "i-2")
    with pytest.raises(KeyError):
        imds.endpoint("n1")


def test_many_nodes_have_ports_of_their_own(imds: FakeImds) -> None:
    names = [f"m{i}" for i in range(64)]
    for name in names:
        imds.add(name, instance_id=f"i-{name}", instance_type="t", availability_zone="eu-west-1c")
    for name in names:
        endpoint = imds.endpoint(name)
        assert get(endpoint, "instance-id", token(endpoint)) == (200, f"i-{name}")
    assert imds.requests("m0") == 2
