"""An S3 that only lists and reads: a run of many checkpoints of many files, none of which is kept anywhere.

It computes each page from the names alone, as S3 does: 1,000 entries at most, in the order of UTF-8, folders rolled up
at the delimiter, continued by a token or after a key. It counts what it is asked.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote

from s3_multipart import Ask, parse

PAGE = 1000
_LAST = "\U0010ffff"  # after every name in a folder


@dataclass
class Tree:
    """Folders with files right under a prefix; `read` returns a file's bytes."""

    prefix: str  # ends with a slash
    folders: Mapping[str, Mapping[str, int]]  # name -> file -> size
    read: Callable[[str, str], bytes]
    url: str = ""
    asked: list[Ask] = field(default_factory=list)

    def lists(self) -> int:
        """Return how many pages were listed."""
        return sum("list-type" in ask.query for ask in self.asked)

    def __post_init__(self) -> None:
        self._names = sorted(self.folders)

    def keys(self, after: str) -> Iterator[tuple[str, int]]:
        """Yield keys and sizes that come after a key, in order, without making the others."""
        first = after[len(self.prefix) :].partition("/")[0] if after.startswith(self.prefix) else ""
        for name in self._names[bisect.bisect_left(self._names, first) :]:
            if after >= f"{self.prefix}{name}/{_LAST}":
                continue
            for file in sorted(self.folders[name], key=str.encode):
                key = f"{self.prefix}{name}/{file}"
                if key > after:
                    yield key, self.folders[name][file]

    def entries(self, prefix: str, delimiter: str, after: str) -> Iterator[tuple[str, int | None]]:
        """Yield what a listing holds: keys with their sizes, and folders (size None) once each."""
        found = self.keys(max(after, prefix))
        while (entry := next(found, None)) is not None and entry[0].startswith(prefix):
            head, slash, _ = entry[0][len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if not slash:
                yield entry
                continue
            folder = prefix + head + slash
            if folder != after:
                yield folder, None
            found = self.keys(folder + _LAST)  # the rest of it is rolled up


def page_of(tree: Tree, query: Mapping[str, str]) -> bytes:
    """Return the answer to ListObjectsV2."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    most = min(int(query.get("max-keys", PAGE)), PAGE)
    after = query.get("continuation-token", query.get("start-after", ""))
    page: list[tuple[str, int | None]] = []
    more = False
    for entry in tree.entries(prefix, delimiter, after):
        if len(page) == most:
            more = True
            break
        page.append(entry)
    contents = "".join(
        f"<Contents><Key>{quote(key)}</Key><Size>{size}</Size></Contents>" for key, size in page if size is not None
    )
    folders = "".join(
        f"<CommonPrefixes><Prefix>{quote(key)}</Prefix></CommonPrefixes>" for key, size in page if size is None
    )
    token = f"<NextContinuationToken>{quote(page[-1][0])}</NextContinuationToken>" if more else ""
    return (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<EncodingType>url</EncodingType><IsTruncated>{str(more).lower()}</IsTruncated>"
        f"<KeyCount>{len(page)}</KeyCount>{token}{contents}{folders}</ListBucketResult>"
    ).encode()


@contextmanager
def listing(tree: Tree) -> Iterator[Tree]:
    """Serve a tree on loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.tree = tree  # type: ignore[attr-defined]
    tree.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield tree
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        tree: Tree = self.server.tree  # type: ignore[attr-defined]
        ask = parse("GET", self.path)
        tree.asked.append(ask)
        if "list-type" in ask.query:
            return self._send(200, page_of(tree, ask.query))
        name, _, file = ask.key[len(tree.prefix) :].partition("/")
        if file not in tree.folders.get(name, {}):
            return self._send(404, b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code></Error>')
        return self._send(200, tree.read(name, file))

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
