"""What can go wrong with S3, each by a name of its own that says what to do."""

from __future__ import annotations

from typing import Any

from pctool.errors import AwsError

RIGHTS = (
    "s3:ListBucket, s3:GetObject, s3:PutObject, s3:DeleteObject, s3:ListBucketMultipartUploads, "
    "s3:ListMultipartUploadParts and s3:AbortMultipartUpload"
)

# as S3's API reference lists them; a HEAD has no body, so there the code is the status
_REFUSED = {"403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AllAccessDisabled"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"}
_SKEWED = {"RequestTimeTooSkewed"}
_ABSENT = {"404", "NoSuchKey", "NotFound"}
_SLOW = {"SlowDown", "503", "RequestTimeout", "Throttling", "ServiceUnavailable"}
_CONFLICT = {"409", "ConditionalRequestConflict", "OperationAborted"}
_EXISTS = {"412", "PreconditionFailed"}
# InvalidPart: at completion S3 does not know a part, or knows another one of that number
_CORRUPT = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "InvalidPart"}


class S3RefusedError(AwsError):
    """S3 does not let this identity do that."""


class S3CredentialsError(S3RefusedError):
    """There are no credentials, or they are good no longer. Each try looks for them anew."""


class S3ClockError(AwsError):
    """This node's clock is so far off that S3 takes none of its signatures."""


class S3NotThereError(AwsError):
    """The bucket, or an object that should be in it, is not there."""


class S3SlowError(AwsError):
    """S3 throttles, or did not answer in time."""


class S3DownError(AwsError):
    """S3 cannot be reached, or fails."""


class S3CorruptError(AwsError):
    """What S3 received or keeps is not what was sent."""


class ConflictError(AwsError):
    """409: another request for this key is under way."""


class ExistsError(AwsError):
    """412: the condition of a request does not hold."""


class NoUploadError(AwsError):
    """404: a multipart upload was completed or aborted."""


_EXPECTED: dict[str, type[AwsError]] = {
    **dict.fromkeys(_EXISTS, ExistsError),
    **dict.fromkeys(_CONFLICT, ConflictError),
    "NoSuchUpload": NoUploadError,
}
RETRIED = (S3SlowError, S3DownError, S3CorruptError)  # what another try may mend


def code_of(error: Any) -> str:
    """Return S3's error code of a botocore ClientError."""
    return str(error.response.get("Error", {}).get("Code", ""))


def is_absent(error: Any) -> bool:
    """Return whether a ClientError says that the object is not there."""
    return code_of(error) in _ABSENT


def answered(error: Any, url: str, key: str) -> AwsError:
    """Return our error for an answer of S3 that is one (a botocore ClientError)."""
    code, where = code_of(error), f"{url} ({key})"
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in _EXPECTED:
        return _EXPECTED[code](str(error), where=where)
    if code in _CORRUPT:
        return S3CorruptError(f"S3 refused what it received: {error}", where=where, fix="it is sent again")
    if code == "NoSuchBucket":
        bucket = url.split("/")[2]
        return S3NotThereError(
            f"the bucket {bucket} is not there", where=where, fix="make it, or correct the store's address"
        )
    if code in _ABSENT:
        return S3NotThereError("the object is not there", where=f"{url}/{key}")
    if code in _SLOW:
        return S3SlowError(f"S3 is throttling: {error}", where=where, fix="it is tried again later")
    return _refused(error, code, where) if status in {401, 403} or code in _REFUSED | _EXPIRED else _down(error, where)


def _refused(error: Any, code: str, where: str) -> AwsError:
    if code in _SKEWED:
        return S3ClockError(
            f"this node's clock is off, so S3 takes no request of it: {error}",
            where=where,
            fix="set the clock (`chronyc tracking` says by how much it is off); it is tried again meanwhile",
        )
    if code in _EXPIRED:
        return S3CredentialsError(
            f"the credentials have expired: {error}",
            where=where,
            fix="renew them where they come from; they are read anew at each try",
        )
    return S3RefusedError(f"S3 refused: {error}", where=where, fix=f"give the nodes' role {RIGHTS} there")


def _down(error: Any, where: str) -> AwsError:
    return S3DownError(f"S3 failed: {error}", where=where, fix="it is tried again later")


def unanswered(error: Exception, url: str, key: str) -> AwsError:
    """Return our error where no answer came, or none that can be read (a BotoCoreError or urllib3's)."""
    from botocore import exceptions as boto

    where = f"{url} ({key})"
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError)):
        return S3CredentialsError(f"no credentials for S3: {error}", where=where, fix="give the nodes an IAM role")
    if isinstance(error, (boto.ConnectTimeoutError, boto.ReadTimeoutError)) or "timed out" in str(error).lower():
        return S3SlowError(f"S3 did not answer in time: {error}", where=where, fix="it is tried again later")
    if isinstance(error, boto.FlexibleChecksumError):
        return S3CorruptError(f"what S3 sent is not what it keeps a checksum of: {error}", where=where)
    return S3DownError(f"S3 cannot be reached: {error}", where=where, fix="check the network and the endpoint")
