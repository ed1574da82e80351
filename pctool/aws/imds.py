"""Ask the EC2 instance metadata service (IMDSv2) of this node.

A small socket client instead of http.client: measured on Python 3.11, `import http.client` adds 6.1 MB of resident
memory (the email package), `import socket` 0.8 MB, and the watcher has 8 MB inside launch.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from datetime import datetime, timezone

from pctool.errors import AwsError, UsageError

DEFAULT_ENDPOINT = "http://169.254.169.254"
TIMEOUT_S = 2.0  # one request; the service answers in about a millisecond
TOTAL_S = 4.0  # one question with all its requests: token, answer, and once more if the token was stale
TOKEN_TTL_S = 21600  # the longest IMDS gives
_MAX_ANSWER = 65536


class ImdsError(AwsError):
    """The instance metadata service gave no usable answer."""


class ImdsAbsentError(ImdsError):
    """Nothing listens there: not an EC2 instance, or IMDS is off."""


class ImdsRefusedError(ImdsError):
    """The service refused the token, or refuses to give one."""


class ImdsFailedError(ImdsError):
    """The service answered with an error or with nonsense."""


class ImdsSilentError(ImdsError):
    """The service took the connection and gave no answer in time, or the network swallows the packets."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """EC2's spot interruption notice."""

    action: str  # terminate | stop | hibernate
    time: float  # seconds since the epoch when it will happen; 0.0 where the notice does not say


@dataclass(frozen=True)
class _Answer:
    status: int
    body: str


class Imds:
    """The service of one node. Tokens are kept and fetched anew on 401. Not for use by several threads at once."""

    def __init__(self, endpoint: str = DEFAULT_ENDPOINT, *, timeout: float = TIMEOUT_S, total: float = TOTAL_S) -> None:
        self.endpoint = endpoint
        self._host, self._port = _address(endpoint)
        self._timeout = timeout
        self._total = total
        self._token: str | None = None

    def notice(self) -> Notice | None:
        """Return the spot interruption notice, or None if none is scheduled. Raise ImdsError."""
        text = self.get("spot/instance-action")
        return None if text is None else parse_notice(text)

    def rebalance(self) -> float | None:
        """Return when EC2 recommended a rebalance (seconds since the epoch), or None. Raise ImdsError."""
        text = self.get("events/recommendations/rebalance")
        return None if text is None else _time_of(text, "noticeTime")

    def instance_id(self) -> str | None:
        """Return this instance's id. Raise ImdsError."""
        return self.get("instance-id")

    def get(self, path: str) -> str | None:
        """Return the text below /latest/meta-data/, or None where the service has nothing (404).

        Raises one of the four ImdsErrors (absent, refused, failed, silent), at the latest after `total` seconds.
        """
        deadline = time.monotonic() + self._total
        answer = self._get_once(path, deadline)
        if answer.status == 401:  # the token has gone stale; a fresh one settles whether we are refused
            self._token = None
            answer = self._get_once(path, deadline)
        if answer.status == 404:
            return None
        if answer.status in {401, 403}:
            raise ImdsRefusedError(f"refuses to answer ({answer.status})", where=self.endpoint, fix=_FIX_REFUSED)
        if answer.status != 200:
            raise ImdsFailedError(f"answers with {answer.status}", where=self.endpoint)
        return answer.body

    def _get_once(self, path: str, deadline: float) -> _Answer:
        token = self._token or self._fetch_token(deadline)
        return self._ask("GET", f"/latest/meta-data/{path}", f"X-aws-ec2-metadata-token: {token}", deadline)

    def _fetch_token(self, deadline: float) -> str:
        header = f"X-aws-ec2-metadata-token-ttl-seconds: {TOKEN_TTL_S}"
        answer = self._ask("PUT", "/latest/api/token", header, deadline)
        if 400 <= answer.status < 500:
            raise ImdsRefusedError(f"gives no token ({answer.status})", where=self.endpoint, fix=_FIX_REFUSED)
        if answer.status != 200 or not answer.body:
            raise ImdsFailedError(f"gives no token ({answer.status})", where=self.endpoint)
        self._token = answer.body.strip()
        return self._token

    def _ask(self, method: str, path: str, header: str, deadline: float) -> _Answer:
        deadline = min(deadline, time.monotonic() + self._timeout)
        length = "Content-Length: 0\r\n" if method == "PUT" else ""
        request = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n{length}{header}\r\n\r\n"
        try:
            with socket.create_connection((self._host, self._port), timeout=_left(deadline)) as connection:
                connection.sendall(request.encode())
                return _receive(connection, deadline)
        except TimeoutError:
            raise ImdsSilentError(f"gave no answer in {self._timeout:g} s", where=self.endpoint) from None
        except (ConnectionResetError, BrokenPipeError):
            raise ImdsFailedError("closed the connection", where=self.endpoint) from None
        except OSError as error:
            raise ImdsAbsentError(f"cannot be reached: {error.strerror or error}", where=self.endpoint) from None
        except ValueError as error:
            raise ImdsFailedError(f"answers nonsense: {error}", where=self.endpoint) from None


_FIX_REFUSED = "allow the instance metadata service: HttpEndpoint enabled, and a hop limit of 2 inside containers"


def parse_notice(text: str) -> Notice:
    """Read the text of spot/instance-action. A notice that cannot be read is still one: better stop for nothing."""
    try:
        action = str(json.loads(text)["action"])
    except (ValueError, KeyError, TypeError):
        action = "unknown"
    return Notice(action=action, time=_time_of(text, "time"))


def _time_of(text: str, key: str) -> float:
    """Return the time under `key` in seconds since the epoch, 0.0 where there is none to read."""
    try:
        when = datetime.fromisoformat(json.loads(text)[key].replace("Z", "+00:00"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0.0
    return (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()


def _address(endpoint: str) -> tuple[str, int]:
    """Split http://host[:port][/]; IPv6 hosts stand in brackets, as [fd00:ec2::254]."""
    scheme, separator, rest = endpoint.partition("://")
    netloc = rest.split("/", 1)[0]
    host, colon, port = netloc.rpartition(":") if not netloc.endswith("]") else (netloc, "", "")
    host = (host if colon else netloc).strip("[]")
    if scheme != "http" or not separator or not host or (colon and not (port.isdigit() and 0 < int(port) < 65536)):
        raise UsageError(
            f"instance metadata endpoint {endpoint!r} is not http://host[:port]",
            where="AWS_EC2_METADATA_SERVICE_ENDPOINT",
            fix=f"unset it, or set it to {DEFAULT_ENDPOINT}",
        )
    return host, int(port) if colon else 80


def _left(deadline: float) -> float:
    """Return the seconds left; raise TimeoutError if there are none (0 would mean a non-blocking socket)."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _receive(connection: socket.socket, deadline: float) -> _Answer:
    """Read one answer by its Content-Length, or to the end of the stream; a slow trickle runs into the deadline."""
    data = b""
    while True:
        head, end, body = data.partition(b"\r\n\r\n")
        length = _content_length(head) if end else None
        if length is not None and len(body) >= length:
            return _Answer(_status(head), body[:length].decode(errors="replace"))
        connection.settimeout(_left(deadline))
        chunk = connection.recv(4096)
        data += chunk
        if not chunk and end:
            return _Answer(_status(head), body.decode(errors="replace"))
        if not chunk or len(data) > _MAX_ANSWER:
            raise ValueError("no whole HTTP answer")


def _status(head: bytes) -> int:
    parts = head.split(b" ", 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
        raise ValueError("not HTTP")
    return int(parts[1])


def _content_length(head: bytes) -> int | None:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return None
