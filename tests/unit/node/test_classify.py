"""Whose fault a rank's end is. The texts in rank_logs/ were captured from torch 2.13; NCCL's follow its formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from pctool.node.classify import classify, classify_agent, is_bind_failure

LOGS = Path(__file__).parent / "rank_logs"

CAPTURED = [
    ("gloo-peer-killed", True, "Connection closed by peer"),
    ("gloo-peer-killed-in-ddp", True, "Connection closed by peer"),
    ("gloo-reset-in-barrier", True, "Connection reset by peer"),
    ("gloo-timeout", True, "Timed out waiting 3000ms"),
    ("store-host-killed", True, "Failed to recv, got 0 bytes"),
    ("store-timeout", True, "wait timeout after 2000ms"),
    ("store-absent", True, "timed out after 3000ms while trying to connect"),
    ("user-chained", True, "Connection closed by peer"),
    ("user-http", False, "Connection refused"),
    ("user-assert", False, "AssertionError: shape mismatch"),
    ("user-multi", False, "KeyError"),
    ("value-error", False, "ValueError: bad sample 17"),
]

NCCL_REMOTE = """[rank3]: Traceback (most recent call last):
[rank3]:   File "/home/ada/train.py", line 40, in step
[rank3]:     dist.all_reduce(grad)
[rank3]: torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, \
remote process exited or there was a network error, NCCL version 2.26.2
[rank3]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
[rank3]: Last error:
[rank3]: NET/OFI Request completed with error
"""
NCCL_USAGE = """Traceback (most recent call last):
  File "/home/ada/train.py", line 12, in <module>
    dist.broadcast(x, 0)
torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 53000
"""
WATCHDOG = """[rank2]:[E ProcessGroupNCCL.cpp:632] [Rank 2] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=880, OpType=ALLREDUCE, NumelIn=131137536, NumelOut=131137536, Timeout(ms)=600000) ran for 600012 ms
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 2] Process group watchdog thread terminated with exception: [Rank 2] \
Watchdog caught collective operation timeout: WorkNCCL(SeqNum=880, OpType=ALLREDUCE)
"""
WATCHDOG_CUDA = """[rank2]:[E ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank 2] Process group watchdog \
thread terminated with exception: CUDA error: an illegal memory access was encountered
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 2] CUDA error: an illegal memory access was encountered
"""
CUDA_OOM = """Traceback (most recent call last):
  File "/home/ada/train.py", line 8, in <module>
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB.
"""
RESUMED = """Traceback (most recent call last):
  File "/home/ada/train.py", line 5, in <module>
    fetch()
RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer
caught, going on
Traceback (most recent call last):
  File "/home/ada/train.py", line 9, in <module>
    step()
ZeroDivisionError: division by zero
"""


@pytest.mark.parametrize(("name", "communication", "reason"), CAPTURED)
def test_captured_ends(name: str, communication: bool, reason: str) -> None:
    verdict = classify(1, (LOGS / f"{name}.txt").read_text())
    assert verdict.communication is communication
    assert reason in verdict.reason


STORE_DOWN = """Traceback (most recent call last):
  File "restore.py", line 44, in find_whole
pctool.aws.s3.S3DownError: s3://b/p: S3 cannot be reached: CUDA error is no part of this
  -> check the endpoint

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 9, in <module>
pctool.checkpoint.stores.StoreUnreadableError: no checkpoint could be restored: S3 cannot be reached
  -> see to it that the store can be read (`pctool doctor`); the next attempt tries again
"""
FOREIGN = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
pctool.checkpoint.foreign.ForeignCheckpointError: /fsx/ada/gpt: s3://b/gpt/checkpoints holds checkpoints of another run
  -> choose another store prefix
"""


@pytest.mark.parametrize(
    ("code", "text", "communication", "reason"),
    [
        (1, NCCL_REMOTE, True, "remote process exited"),
        (1, NCCL_USAGE, False, "invalid usage"),
        (-6, WATCHDOG, True, "Watchdog caught collective operation timeout"),
        (-6, WATCHDOG_CUDA, False, "CUDA error"),
        (1, CUDA_OOM, False, "CUDA out of memory"),
        (1, STORE_DOWN, True, "StoreUnreadableError: no checkpoint could be restored"),
        (1, FOREIGN, True, "ForeignCheckpointError: /fsx/ada/gpt: s3://b/gpt/checkpoints holds"),
        (1, RESUMED, False, "ZeroDivisionError"),
        (3, "", False, "exit code 3"),
        (3, "step 5 loss 2.0\n", False, "exit code 3"),
        (-9, "step 5\n", False, "killed by SIGKILL (out of memory?)"),
        (-9, NCCL_REMOTE, False, "killed by SIGKILL"),
        (-11, "", False, "killed by SIGSEGV"),
        (-6, "", False, "killed by SIGABRT"),
        (
            -6,
            "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n",
            False,
            "bad_alloc",
        ),
        (-40, "", False, "killed by"),
    ],
)
def test_ends(code: int, text: str, communication: bool, reason: str) -> None:
    verdict = classify(code, text)
    assert verdict.communication is communication
    assert reason in verdict.reason


@pytest.mark.parametrize(
    ("code", "text", "killed"),
    [
        (-9, "", True),
        (-11, "", True),
        (-6, WATCHDOG_CUDA, True),
        (-6, WATCHDOG, False),
        (3, "", False),
        (1, CUDA_OOM, False),
    ],
)
def test_what_died_of_a_signal(code: int, text: str, killed: bool) -> None:
    assert classify(code, text).killed is killed


def test_an_abort_in_teardown_hides_no_exception() -> None:
    aborted = "terminate called without an active exception\n"
    assert classify(-6, "step 9\n" + aborted).teardown
    assert not classify(-6, "step 9\n").teardown
    verdict = classify(-6, (LOGS / "value-error.txt").read_text() + aborted)
    assert (verdict.reason, verdict.killed, verdict.teardown) == ("ValueError: bad sample 17", False, False)
    assert classify(-6, (LOGS / "gloo-peer-killed.txt").read_text() + aborted).communication


def test_a_worker_killed_from_outside_is_no_error_of_the_program() -> None:
    head = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    next(batches)\n'
    killed = "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. "
    crashed = "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Segmentation fault. "
    assert classify(1, head + killed).killed
    assert not classify(1, head + crashed).killed


def test_a_tail_that_begins_in_the_middle_of_a_traceback() -> None:
    text = (LOGS / "gloo-peer-killed.txt").read_text()
    assert not classify(1, text[-150:]).communication  # no traceback left: nothing to say
    assert classify(1, "half a line\n" + text).communication


def test_torchruns_own_ends() -> None:
    bind = (
        "The server socket has failed to listen on any local network address. port: 23460, useIpv6: false, "
        "code: -98, name: EADDRINUSE, message: address already in use"
    )
    assert is_bind_failure(bind)
    assert not is_bind_failure("The client socket has timed out after 3000ms while trying to connect to (n0, 1).")
    assert classify_agent("DistNetworkError", "The client socket has timed out after 60000ms").communication
    assert classify_agent("RendezvousTimeoutError", "").communication
    assert not classify_agent("ValueError", "bad argument").communication


def test_a_syntax_error_of_the_script_is_named_though_it_has_no_traceback() -> None:
    tail = '  File "/fsx/train.py", line 3\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'
    verdict = classify(1, tail)
    assert (verdict.communication, verdict.reason) == (False, "exit code 1: SyntaxError: invalid syntax")


# What clean-up and other threads print when a rank has died, captured from Python 3.11.
IGNORED = """Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f1>
Traceback (most recent call last):
  File "/x/torch/utils/data/dataloader.py", line 1666, in __del__
    self._shutdown_workers()
AttributeError: '_MultiProcessingDataLoaderIter' object has no attribute '_workers_status'
"""
THREAD = """Exception in thread Thread-3 (_pin_memory_loop):
Traceback (most recent call last):
  File "/x/torch/utils/data/_utils/pin_memory.py", line 59, in _pin_memory_loop
    do_one_step()
EOFError

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/usr/lib/python3.11/threading.py", line 1045, in _bootstrap_inner
    self.run()
ConnectionResetError: [Errno 104] Connection reset by peer
"""
LOGGED = """WARNING could not upload
Traceback (most recent call last):
  File "/x/requests/adapters.py", line 700, in send
    raise ConnectionError(e, request=request)
requests.exceptions.ConnectionError: HTTPSConnectionPool(host='metrics'): Max retries exceeded
"""
STEPS = "".join(f"step {step} loss 3.2\n" for step in range(30))
RICH = """╭───────────────────── Traceback (most recent call last) ──────────────────────╮
│ /fsx/train.py:40 in <module>                                                 │
│ ❱ 40     loss.backward()                                                     │
╰──────────────────────────────────────────────────────────────────────────────╯
DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3699, remote process
exited or there was a network error, NCCL version 2.27.5
ncclRemoteError: A call failed possibly due to a network error
"""
RICH_OWN = RICH[: RICH.index("DistBackendError")] + "KeyError: 'lr'\n"


@pytest.mark.parametrize(
    ("code", "text", "communication"),
    [
        (1, NCCL_REMOTE + IGNORED, True),
        (1, NCCL_REMOTE + THREAD + IGNORED, True),
        (1, IGNORED + THREAD + NCCL_REMOTE, True),
        (-6, NCCL_REMOTE + IGNORED + "terminate called without an active exception\n", True),
        (-6, LOGGED + STEPS + WATCHDOG, True),
        (-6, LOGGED + WATCHDOG, True),
        (-6, LOGGED + STEPS + WATCHDOG_CUDA, False),
        (1, RICH, True),
        (1, LOGGED + STEPS + RICH, True),
        (1, RICH_OWN, False),
        (1, STEPS + "the run failed: ncclRemoteError: A call failed possibly due to a network error\nbye\n", True),
        (1, "[rank0]:[W1130 11:00:00.000 TCPStore.cpp:125] recvValue failed\ntrain.py: error: no --lr\n", False),
        (-11, NCCL_REMOTE, True),
        (-7, (LOGS / "gloo-peer-killed.txt").read_text() + IGNORED, True),
        (-11, (LOGS / "value-error.txt").read_text(), False),
    ],
)
def test_what_came_before_or_after_a_lost_neighbour_does_not_hide_it(code: int, text: str, communication: bool) -> None:
    assert classify(code, text).communication is communication


def test_the_main_threads_own_exception_is_named_and_another_threads_only_if_it_is_the_only_one() -> None:
    own = (LOGS / "value-error.txt").read_text()
    assert classify(1, own + THREAD + IGNORED).reason == "ValueError: bad sample 17"
    assert classify(1, RICH_OWN).reason == "KeyError: 'lr'"
    assert classify(1, "step 5\n" + THREAD).reason.startswith("ConnectionResetError")
    assert not classify(1, own + THREAD).communication


def test_a_traceback_logged_long_before_an_abort_in_teardown_is_not_its_reason() -> None:
    aborted = "terminate called without an active exception\n"
    assert classify(-6, LOGGED + STEPS + aborted).teardown
    warned = "[rank0]:[W1130 ProcessGroupNCCL.cpp:1250] destroy_process_group() was not called\n"
    assert not classify(-6, (LOGS / "value-error.txt").read_text() + warned + IGNORED + aborted).teardown
