"""An S3 for the contract tests: one moto server a session, an empty bucket and a stand-in a test."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest
from s3_standin import StandIn, moto_server, stand_in

from pctool.aws import s3 as door
from pctool.aws import s3parts


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture
def s3(moto: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[StandIn]:
    """Make an S3 with an empty bucket of its own, behind the stand-in."""
    with stand_in(moto) as state:
        for name, value in environment(state.url).items():
            monkeypatch.setenv(name, value)
        # what is tested is that waits end; a stand-in on a loaded machine answers later than half a second at times
        monkeypatch.setattr(door, "CONNECT_TIMEOUT_S", 3.0)
        monkeypatch.setattr(door, "READ_TIMEOUT_S", 3.0)
        monkeypatch.setattr(door, "ATTEMPTS", 2)
        monkeypatch.setattr(door, "CONFLICT_PAUSES_S", (0.0,) * 4)
        monkeypatch.setattr(s3parts, "DOWNLOAD_PAUSES_S", (0.0, 0.0))
        monkeypatch.setattr(s3parts, "UPLOAD_PAUSES_S", (0.0, 0.0))
        make_bucket(moto, bucket_of(request))
        yield state


def make_bucket(moto: str, name: str) -> None:
    """Make a bucket by hand: a client costs more time than most tests."""
    connection = http.client.HTTPConnection(moto.removeprefix("http://"), timeout=30)
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()


def environment(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL_S3": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def bucket_of(request: pytest.FixtureRequest) -> str:
    return f"b-{abs(hash(request.node.nodeid))}"


@pytest.fixture
def url(s3: StandIn, request: pytest.FixtureRequest) -> str:
    return f"s3://{bucket_of(request)}/some/prefix"
