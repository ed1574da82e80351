"""A program that makes itself a subreaper and then becomes another program, as Slurm wants its slurmstepd to be.

From 24.11 on slurmd takes only a real ELF program for its slurmstepd, not a script (it runs it by file descriptor),
and it looks at the arguments. So on x86-64 the program is written here, all 200 bytes of it: it costs nothing at the
start of a step, and passes argv and environment on as they are. On other machines it is a script, which works up to
23.11 and from 26.05 on.
"""

from __future__ import annotations

import platform
import shlex
import struct
import sys

_BASE, _HEADERS = 0x400000, 64 + 56
_CODE = bytes.fromhex(
    "b89d000000"  # mov eax, 157            prctl
    "bf24000000"  # mov edi, 36             PR_SET_CHILD_SUBREAPER; it stays over exec
    "be01000000"  # mov esi, 1
    "31d2"  # xor edx, edx
    "4d31d2"  # xor r10, r10
    "4d31c0"  # xor r8, r8
    "0f05"  # syscall
    "488b0c24"  # mov rcx, [rsp]            argc
    "488d742408"  # lea rsi, [rsp+8]        argv
    "488d54ce08"  # lea rdx, [rsi+rcx*8+8]  envp
    "488d3d13000000"  # lea rdi, [rip+19]   the path, behind the code
    "b83b000000"  # mov eax, 59             execve
    "0f05"  # syscall
    "bf7f000000"  # mov edi, 127
    "b83c000000"  # mov eax, 60             exit
    "0f05"  # syscall
)
_SCRIPT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])"


def program(path: str) -> bytes:
    """Return the program that becomes the one at `path` with a subreaper's duties."""
    if platform.machine() != "x86_64":
        start = shlex.join([sys.executable, "-ISc", _SCRIPT, path])
        return f'#!/bin/sh\nexec {start} "$@"\n'.encode()
    body = _CODE + path.encode() + b"\0"
    size = _HEADERS + len(body)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")  # 64 bit, little-endian
    header = struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, _BASE + _HEADERS, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000)  # one, readable and executable
    return ident + header + segment + body
