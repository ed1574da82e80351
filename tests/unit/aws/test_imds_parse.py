"""What the IMDS client reads out of texts and addresses."""

from __future__ import annotations

import pytest

from pctool.aws.imds import Imds, Notice, parse_notice
from pctool.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"action": "terminate", "time": "2017-09-18T08:22:00Z"}', Notice(action="terminate", time=1505722920.0)),
        ('{"action": "hibernate", "time": "2017-09-18T08:22:00"}', Notice(action="hibernate", time=1505722920.0)),
        ('{"action": "stop"}', Notice(action="stop", time=0.0)),
        ("<html>", Notice(action="unknown", time=0.0)),
        ("[]", Notice(action="unknown", time=0.0)),
    ],
)
def test_a_notice_is_a_notice_even_where_it_cannot_be_read(text: str, expected: Notice) -> None:
    assert parse_notice(text) == expected


@pytest.mark.parametrize(
    "endpoint", ["http://169.254.169.254", "http://169.254.169.254/", "http://[fd00:ec2::254]", "http://h:8080"]
)
def test_endpoints_that_are_fine(endpoint: str) -> None:
    assert Imds(endpoint).endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint", ["", "169.254.169.254", "https://h", "http://", "http://h:x", "http://h:99999", "http://h:0"]
)
def test_endpoints_that_are_not(endpoint: str) -> None:
    with pytest.raises(UsageError, match="AWS_EC2_METADATA_SERVICE_ENDPOINT"):
        Imds(endpoint)
