"""The tree of errors: what a user reads, and the exit code each class owns."""

from __future__ import annotations

import pytest

from pctool import errors
from pctool.errors import PctoolError

EXIT_CODES = {
    "PctoolError": 1,
    "UsageError": 2,
    "SlurmError": 3,
    "AwsError": 3,
    "RunInUseError": 3,
    "FencedError": 3,
    "NotFoundError": 4,
    "IncompleteError": 4,
}


def tree(root: type[PctoolError] = PctoolError) -> set[type[PctoolError]]:
    return {root}.union(*(tree(child) for child in root.__subclasses__()))


def test_every_class_in_errors_owns_the_code_that_is_documented() -> None:
    own = {cls.__name__: cls.exit_code for cls in tree() if cls.__module__ == errors.__name__}
    assert own == EXIT_CODES


def test_codes_that_slurm_reads_are_never_an_error_of_ours() -> None:
    reserved = {errors.REQUEUE, errors.HOLD, errors.INTERRUPTED, 0}
    assert reserved.isdisjoint(cls.exit_code for cls in tree())
    assert (errors.REQUEUE, errors.HOLD, errors.INTERRUPTED) == (85, 86, 130)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (PctoolError("it broke"), "it broke"),
        (PctoolError("no key 'x'", where="job.toml:3"), "job.toml:3: no key 'x'"),
        (PctoolError("it broke", fix="mend it"), "it broke\n  -> mend it"),
        (PctoolError("it broke", where="f", fix="mend it"), "f: it broke\n  -> mend it"),
    ],
)
def test_message_says_where_what_and_what_to_do(error: PctoolError, text: str) -> None:
    assert str(error) == text
