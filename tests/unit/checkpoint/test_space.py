"""Room for one more checkpoint: the file system's own word, and that of Lustre's OSTs.

The texts of `lfs df` follow lustre/utils/lfs.c (columns in 1K-blocks, `UUID : inactive device`); it has not been run.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from pctool.checkpoint import lfs
from pctool.checkpoint.lfs import LfsDf, Ost, lustre_mount, mount_of, parse_df
from pctool.checkpoint.space import LFS_PERIOD_S, RESERVE, RoomCheck, Space, check_room, judge, space_in
from pctool.checkpoint.stores import StoreUnreadableError

GIB = 1 << 30

ONE_FULL = """\
UUID                   1K-blocks        Used   Available Use% Mounted on
fsx12-MDT0000_UUID      34435200      511232    33921920   2% /fsx[MDT:0]
fsx12-OST0000_UUID    1181121792  1023411200   157709568  87% /fsx[OST:0]
fsx12-OST0001_UUID    1181121792  1181109248       10496 100% /fsx[OST:1]
fsx12-OST0002_UUID    1181121792   857701376   323419392  73% /fsx[OST:2]

filesystem_summary:   3543365376  3062221824   481139456  87% /fsx

"""
ONE_AWAY = """\
UUID                   1K-blocks        Used   Available Use% Mounted on
fsx12-MDT0000_UUID      34435200      511232    33921920   2% /my fsx[MDT:0]
OST0000             : inactive device
fsx12-OST0001_UUID    1181121792     1109248  1180012544   1% /my fsx[OST:1] f
fsx12-OST0002_UUID  : Resource temporarily unavailable
"""
MOUNTINFO = """\
22 1 259:1 / / rw,noatime shared:1 - ext4 /dev/root rw
35 22 0:31 / /home rw,nosuid shared:7 - nfs4 10.0.0.5:/home rw
61 22 0:44 / /fsx rw,noatime shared:9 - lustre 10.0.1.7@tcp:/abcd rw,flock
62 61 0:45 / /fsx/local\\040disk rw master:3 - xfs /dev/nvme1n1 rw
a line that is none
"""


def test_lfs_df_lists_each_ost_in_bytes() -> None:
    assert parse_df(ONE_FULL) == [
        Ost(name="fsx12-OST0000_UUID", available=157709568 * 1024),
        Ost(name="fsx12-OST0001_UUID", available=10496 * 1024),
        Ost(name="fsx12-OST0002_UUID", available=323419392 * 1024),
    ]


def test_osts_that_do_not_answer_are_listed_too() -> None:
    assert parse_df(ONE_AWAY) == [
        Ost(name="OST0000", available=None, why="inactive device"),
        Ost(name="fsx12-OST0001_UUID", available=1180012544 * 1024),
        Ost(name="fsx12-OST0002_UUID", available=None, why="Resource temporarily unavailable"),
    ]


@pytest.mark.parametrize("text", ["", "lfs df: cannot find mount\n", "UUID bytes Used Available Use% Mounted on\n"])
def test_what_is_no_table_lists_none(text: str) -> None:
    assert parse_df(text) == []


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/fsx/run/checkpoints", ("/fsx", "lustre")),
        ("/fsx/local disk/x", ("/fsx/local disk", "xfs")),
        ("/fsxx", ("/", "ext4")),
        ("/home/ada", ("/home", "nfs4")),
    ],
)
def test_the_deepest_mount_holds_a_path(path: str, mount: tuple[str, str]) -> None:
    assert mount_of(Path(path), MOUNTINFO) == mount


def test_of_mounts_at_one_place_the_last_counts() -> None:
    assert mount_of(Path("/fsx/x"), MOUNTINFO + "70 61 0:50 / /fsx rw - tmpfs tmpfs rw\n") == ("/fsx", "tmpfs")
    assert mount_of(Path("/x"), "") is None


def test_this_machine_is_asked_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = mount_of(tmp_path.resolve(), lfs.MOUNTS.read_text())
    assert found is not None
    assert os.path.ismount(found[0])
    fake = tmp_path / "mountinfo"
    fake.write_text(f"61 22 0:44 / {tmp_path} rw - lustre 10.0.1.7@tcp:/abcd rw\n")
    monkeypatch.setattr(lfs, "MOUNTS", fake)
    assert lustre_mount(tmp_path / "run") == str(tmp_path)


def test_a_full_ost_is_named_though_the_whole_has_room() -> None:
    room = judge(12 * GIB, 0, Space(bytes=459 * GIB, files=None), parse_df(ONE_FULL), "/fsx/run")
    assert (room.fits, room.doubtful) == (True, True)
    assert "fsx12-OST0001_UUID has 10.2 MiB left, while the whole file system has 459.0 GiB" in room.what
    assert "-O fsx12-OST0001_UUID" in room.fix
    assert str(room).startswith("/fsx/run: ")


def test_osts_with_less_than_their_share_are_short() -> None:
    osts = [Ost(name=f"OST{number:04x}", available=number * GIB) for number in range(1, 9)]
    room = judge(40 * GIB, 0, Space(bytes=100 * GIB, files=None), osts, "/fsx")
    assert "OST0003 has 3.0 GiB left and 1 more are short" in room.what
    assert judge(8 * GIB - 1, 0, Space(bytes=100 * GIB, files=None), osts, "/fsx").what == ""


def test_an_ost_that_is_away_is_named() -> None:
    room = judge(GIB, 0, Space(bytes=100 * GIB, files=None), parse_df(ONE_AWAY), "/fsx")
    assert "OST0000 does not answer (inactive device)" in room.what
    assert room.doubtful


def test_too_little_for_all_cannot_succeed() -> None:
    room = judge(12 * GIB, 0, Space(bytes=3 * GIB, files=None), [], "/fsx/run/checkpoints")
    assert not room.fits
    assert room.what == "a checkpoint needs 12.0 GiB, and 3.0 GiB are free"
    assert all(word in room.fix for word in ("remove old checkpoints", "lower keep", "grow"))
    assert judge(GIB, 0, Space(bytes=GIB + RESERVE, files=None), [], "/x").fits
    assert not judge(GIB, 0, Space(bytes=GIB + RESERVE - 1, files=None), [], "/x").fits


def test_inodes_run_out_too() -> None:
    room = judge(GIB, 100, Space(bytes=100 * GIB, files=100), [], "/x")
    assert (room.fits, "inodes" in room.what) == (False, True)
    assert judge(GIB, 99, Space(bytes=100 * GIB, files=100), [], "/x").fits


def test_the_real_file_system_is_asked_also_before_the_folder_is_there(tmp_path: Path) -> None:
    assert check_room(tmp_path / "run" / "checkpoints", 1).fits
    short = check_room(tmp_path / "run", 1 << 62)
    assert not short.fits
    assert short.where == str(tmp_path / "run")
    found, told = os.statvfs(tmp_path), space_in(tmp_path)
    assert abs(told.bytes - found.f_bavail * found.f_frsize) < GIB
    assert (told.files is None) == (found.f_files == 0)


def test_a_file_system_that_cannot_be_asked_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(StoreUnreadableError, match="cannot be read"):
        check_room(tmp_path / "loop" / "run", 1)


class Counting:
    """Answers like `lfs df`, and counts."""

    def __init__(self) -> None:
        self.asked = 0

    def ask(self) -> list[Ost]:
        self.asked += 1
        return parse_df(ONE_FULL)


def test_lfs_is_asked_once_in_a_while(tmp_path: Path) -> None:
    now, osts = [0.0], Counting()
    check = RoomCheck(tmp_path, osts=osts, clock=lambda: now[0])
    for _ in range(5):
        assert check.check(1).doubtful
    assert osts.asked == 1
    now[0] += LFS_PERIOD_S
    check.check(1)
    assert osts.asked == 2


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_program_is_run_with_the_mount_and_its_code_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "said").write_text(ONE_AWAY)
    argv = (program(tmp_path / "lfs", f'echo "$@" > {tmp_path}/args; cat {tmp_path}/said; exit 11'), "df", "--lazy")
    assert LfsDf("/fsx", argv=argv).ask() == parse_df(ONE_AWAY)
    assert (tmp_path / "args").read_text() == "df --lazy /fsx\n"


def test_without_lfs_nothing_is_known_of_osts(tmp_path: Path) -> None:
    assert LfsDf("/fsx", argv=(str(tmp_path / "none"),)).ask() == []


def test_nobody_waits_for_an_lfs_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lfs, "TIMEOUT_S", 0.3)
    df = LfsDf("/fsx", argv=(program(tmp_path / "lfs", f"echo x >> {tmp_path}/starts; exec sleep 5"),))
    began = time.monotonic()
    assert df.ask() == []
    assert time.monotonic() - began < 3
    assert (tmp_path / "starts").read_text() == "x\n"
