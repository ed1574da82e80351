"""What a run of many checkpoints costs to list on S3, in requests; the server that counts them answers as moto does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from s3_listing import Tree, listing
from s3_standin import StandIn

from pctool.aws import s3 as door_module
from pctool.checkpoint import manifest as mf
from pctool.checkpoint.lineage import candidates
from pctool.checkpoint.s3store import S3Store
from pctool.run.layout import checkpoint_name

PREFIX = "some/prefix/run/checkpoints/"


def make_tree(checkpoints: int, shards: int, unfinished: int = 0, told: int = 2048) -> Tree:
    """Describe a run; the newest `unfinished` ones have no MANIFEST, and one names no more than `told` files."""
    files = {f"__{rank}_0.distcp": rank + 1 for rank in range(shards)}
    entries = {file: mf.FileEntry(size=size, crc64nvme="") for file, size in list(files.items())[:told]}

    def read(name: str, file: str) -> bytes:
        if file != mf.NAME:
            return bytes(files[file])
        step = int(name.partition("-")[2])
        return mf.encode(mf.Manifest(run="run", attempt=0, step=step, parent=None, world_size=1, files=entries))

    names = [checkpoint_name(0, 10 * n) for n in range(1, checkpoints + 1)]
    whole = {**files, mf.NAME: 1}
    return Tree(PREFIX, {name: files if name in names[checkpoints - unfinished :] else whole for name in names}, read)


@pytest.fixture
def serve(s3: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Tree], S3Store]]:
    opened = []

    def start(tree: Tree) -> S3Store:
        opened.append(listing(tree))
        opened[-1].__enter__()
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", tree.url)
        store = S3Store("s3://any-bucket/some/prefix", "run")
        store.s3._client()  # made while the endpoint is this one
        return store

    yield start
    for one in opened:
        one.__exit__(None, None, None)


def test_the_newest_complete_one_of_a_thousand_is_found_in_a_few_requests(serve: Callable[[Tree], S3Store]) -> None:
    tree = make_tree(1000, 1024, unfinished=2)
    store = serve(tree)
    found = next(candidate for candidate in candidates([store]) if candidate.tiers)
    assert found.name == checkpoint_name(0, 9980)
    assert len(tree.asked) == 6  # a page of names, three MANIFESTs, two pages of sizes
    assert tree.lists() == 3


def test_a_thousand_are_listed_in_a_page_and_a_read_each(serve: Callable[[Tree], S3Store]) -> None:
    tree = make_tree(1000, 1024, unfinished=1, told=4)
    found = serve(tree).overview()
    assert list(found) == sorted(tree.folders)
    assert [name for name, data in found.items() if data is None] == [checkpoint_name(0, 10_000)]
    assert mf.decode(found[checkpoint_name(0, 10)] or b"").step == 10
    assert (tree.lists(), len(tree.asked)) == (1, 1001)


def test_names_and_sizes_of_more_than_a_page(serve: Callable[[Tree], S3Store]) -> None:
    tree = make_tree(2500, 2)
    store = serve(tree)
    assert store.names() == sorted(tree.folders)
    assert tree.lists() == 3
    assert store.sizes(checkpoint_name(0, 10)) == {"__0_0.distcp": 1, "__1_0.distcp": 2, mf.NAME: 1}


@pytest.fixture
def on_moto(url: str, s3: StandIn) -> tuple[Tree, S3Store]:
    """Put a small run onto moto too."""
    tree = make_tree(20, 8, unfinished=3)
    store = S3Store(url, "run")
    with ThreadPoolExecutor(8) as pool:
        for name, files in tree.folders.items():
            for file in files:
                ask = store.s3.door(store.key(name, file)).ask
                pool.submit(ask, "put_object", Body=tree.read(name, file))
    return tree, store


def answers(store: S3Store) -> dict[str, object]:
    one = checkpoint_name(0, 100)
    found: dict[str, object] = {
        "names": store.names(),
        "sizes": {name: size for name, size in store.sizes(one).items() if name != mf.NAME},
        "none": store.sizes("nothing"),
        "overview": store.overview(),
        "newest": next(candidate.name for candidate in candidates([store]) if candidate.manifest),
    }
    for query in (
        {"Prefix": PREFIX, "MaxKeys": 7},
        {"Prefix": PREFIX, "Delimiter": "/", "MaxKeys": 7, "StartAfter": PREFIX + one},
        {"Prefix": f"{PREFIX}{one}/", "StartAfter": f"{PREFIX}{one}/{mf.NAME}"},
        {"Prefix": f"{PREFIX}{one}/", "Delimiter": "/", "MaxKeys": 3},
    ):
        page = store.s3.ask("list_objects_v2", "", **query)
        keys = [entry["Key"] for entry in page.get("Contents", [])]
        folders = [entry["Prefix"] for entry in page.get("CommonPrefixes", [])]
        found[str(query)] = (keys, folders, page["IsTruncated"])
    return found


@pytest.mark.parametrize("page", [1000, 7])
def test_the_server_that_counts_answers_as_moto_does(
    on_moto: tuple[Tree, S3Store],
    serve: Callable[[Tree], S3Store],
    s3: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    page: int,
) -> None:
    monkeypatch.setattr(door_module, "LIST_PAGE", page)
    tree, moto = on_moto
    s3.seen.clear()
    expected = answers(moto)
    of_moto = sorted("list-type" in path for _, path in s3.seen)
    assert answers(serve(tree)) == expected
    assert sorted("list-type" in ask.query for ask in tree.asked) == of_moto
