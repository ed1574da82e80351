"""Read parts of an object on S3, so that its bytes can be checked or copied without room for the whole."""

from __future__ import annotations

import time

from pctool.aws.s3 import DOWNLOAD_PAUSES_S, S3, S3CorruptError, S3DownError, S3SlowError

RANGE_BYTES = 16 << 20  # one stream moves about 100 MB/s: a range is done in a sixth of a second


def read_range(s3: S3, key: str, start: int, length: int) -> bytes:
    """Return `length` bytes of an object from `start` on; one that breaks off is begun anew, three tries in all.

    Raises S3NotThereError, S3RefusedError, S3SlowError or S3DownError.
    """
    for pause in DOWNLOAD_PAUSES_S:
        try:
            return _read_once(s3, key, start, length)
        except (S3SlowError, S3DownError, S3CorruptError):
            time.sleep(pause)
    return _read_once(s3, key, start, length)


def _read_once(s3: S3, key: str, start: int, length: int) -> bytes:
    with s3._errors(key):
        answer = s3._client.get_object(Bucket=s3.bucket, Key=s3._key(key), Range=f"bytes={start}-{start + length - 1}")
        return bytes(answer["Body"].read())
