"""The manifest and the predicate that reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pctool.checkpoint import manifest as mf
from pctool.errors import IncompleteError

NAMES = st.text(alphabet="abc_.-0123456789", min_size=1, max_size=12).filter(lambda name: name not in {".", ".."})


def make_checkpoint(folder: Path, files: dict[str, bytes], **fields: object) -> mf.Manifest:
    """Write a complete checkpoint folder and return its manifest."""
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    entries = {name: mf.describe_file(folder / name) for name in files}
    record = {"run": "r", "attempt": 0, "step": 50, "parent": None, "world_size": 2, **fields}
    manifest = mf.Manifest(**record, files=entries)  # type: ignore[arg-type]
    (folder / mf.NAME).write_bytes(mf.encode(manifest))
    return manifest


def test_crc64nvme_is_the_published_check_value() -> None:
    # the check value of CRC-64/NVME for "123456789" in the catalogue of CRC algorithms is ae8b14860a799888
    assert mf.crc64nvme([b"123456789"]) == "rosUhgp5mIg="
    assert mf.crc64nvme([b"1234", b"", b"56789"]) == "rosUhgp5mIg="


@given(
    files=st.dictionaries(NAMES, st.binary(max_size=40), max_size=4),
    step=st.integers(0, 10**9),
    parent=st.none() | st.just("000000-00000001"),
)
def test_what_is_encoded_is_decoded(files: dict[str, bytes], step: int, parent: str | None) -> None:
    entries = {name: mf.FileEntry(size=len(data), crc64nvme=mf.crc64nvme([data])) for name, data in files.items()}
    manifest = mf.Manifest(
        run="r", attempt=1, step=step, parent=parent, world_size=4, files=entries, position={"step": step}, time=1.5
    )
    assert mf.decode(mf.encode(manifest)) == manifest
    assert manifest.bytes == sum(len(data) for data in files.values())


@given(at=st.floats(0, 0.999999), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_in_the_manifest_shows(at: float, bit: int) -> None:
    manifest = mf.Manifest(run="r", attempt=1, step=7, parent=None, world_size=4, files={}, position={"epoch": 3})
    data = bytearray(mf.encode(manifest))
    data[int(at * len(data))] ^= 1 << bit
    try:
        found = mf.decode(bytes(data))
    except IncompleteError:
        return
    assert found == manifest  # the bit was in white space


def test_a_complete_folder_passes_both(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path / "c", {"a": b"x" * 1000, "b": b""})
    (tmp_path / "c" / "left-over.part").write_bytes(b"?")
    assert mf.is_complete(tmp_path / "c") == mf.Verdict(ok=True, manifest=manifest)
    assert mf.verify(tmp_path / "c").ok


def test_a_folder_without_manifest_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a").write_bytes(b"x")
    verdict = mf.is_complete(tmp_path / "c")
    assert not verdict.ok
    assert "no MANIFEST" in verdict.why


@pytest.mark.parametrize(
    ("harm", "cheap", "said"),
    [
        (lambda path: path.unlink(), False, "b: missing"),
        (lambda path: path.write_bytes(b"yyyy"), False, "b: 4 bytes where the manifest says 5"),
        (lambda path: path.write_bytes(b"yyyyz"), True, "b: CRC64-NVME"),
    ],
)
def test_harm_to_a_file_is_named(tmp_path: Path, harm: object, cheap: bool, said: str) -> None:
    make_checkpoint(tmp_path / "c", {"a": b"x" * 10, "b": b"yyyyy"})
    harm(tmp_path / "c" / "b")  # type: ignore[operator]
    assert mf.is_complete(tmp_path / "c").ok is cheap
    verdict = mf.verify(tmp_path / "c")
    assert not verdict.ok
    assert verdict.why.startswith(said)
    assert verdict.bad == ("b",)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "..", "MANIFEST", ""])
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str) -> None:
    record = json.loads(mf.encode(mf.Manifest(run="r", attempt=0, step=0, parent=None, world_size=1, files={})))
    del record["sha256"]
    record["files"] = {name: {"size": 1, "crc64nvme": ""}}
    record["sha256"] = mf._digest(record)
    with pytest.raises(IncompleteError, match="file name"):
        mf.decode(json.dumps(record).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'{"format": 1}', b"\xff\xfe"])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(IncompleteError, match="not a manifest"):
        mf.decode(data)


def test_another_format_says_so() -> None:
    data = mf.encode(mf.Manifest(run="r", attempt=0, step=0, parent=None, world_size=1, files={}))
    with pytest.raises(IncompleteError, match="manifest of format 9"):
        mf.decode(data.replace(b'"format": 1', b'"format": 9'))


def test_a_manifest_vouches_only_for_the_checkpoint_that_it_names(tmp_path: Path) -> None:
    names = ("000000-00000050", "000000-00000060")
    for name, step in zip(names, (50, 60), strict=True):
        make_checkpoint(tmp_path / name, {"a": b"x"}, step=step)
        assert mf.is_complete(tmp_path / name).ok
    one, other = ((tmp_path / name / mf.NAME).read_bytes() for name in names)
    (tmp_path / names[0] / mf.NAME).write_bytes(other)
    verdict = mf.is_complete(tmp_path / names[0])
    assert (verdict.ok, verdict.manifest, verdict.bad) == (False, None, (mf.NAME,))
    assert verdict.why == f"{mf.NAME}: it is that of checkpoint {names[1]}"
    assert not mf.verify(tmp_path / names[0]).ok
    assert not mf.judge(one, {"a": 1}, name=names[1]).ok
    assert mf.judge(one, {"a": 1}).ok  # who does not say which one it is to be gets no answer to that
    assert mf.judge(one, {"a": 1}, name="a copy").ok


@pytest.mark.parametrize(("position", "ok"), [({}, True), ({"step": 50}, True), ({"step": 40}, False)])
def test_a_position_of_another_step_is_not_believed(tmp_path: Path, position: dict[str, int], ok: bool) -> None:
    make_checkpoint(tmp_path / "c", {"a": b"x"}, position=position)
    assert mf.is_complete(tmp_path / "c").ok is ok
