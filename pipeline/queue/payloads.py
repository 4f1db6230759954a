"""The object store for bodies that do not travel in messages: a folder, or S3.

Written by workers before they send the reference; read by trainers, the reconciler and the command
line. An object holds a whole frame, so an outcome whose message was lost can be recovered from it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote, urlsplit

from pipeline.contract.errors import ConfigError, ServiceUnavailable
from pipeline.contract.messages import Completion
from pipeline.queue.frames import decode_completions, encode_completions
from pipeline.queue.signing import COMPLETION, Signer
from pipeline.settings import Settings

E_PAYLOADS = "E203"  #: the store does not answer, or takes nothing more
E_BODY_GONE = "E206"


class PayloadStore(Protocol):
    """Keeps bytes under a key; writing a key again replaces it whole."""

    def put(self, key: str, data: bytes) -> str:
        """Keep data and return its URI."""
        ...

    def get(self, uri: str) -> bytes | None:
        """Return the data, None where there is none."""
        ...

    def uri(self, key: str) -> str:
        """Return the URI a key has or would have."""
        ...

    def delete_all(self, folder: str) -> int:
        """Delete whatever has a key `folder/…`; return how many objects."""
        ...


class FolderPayloads:
    """Objects as files below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    def put(self, key: str, data: bytes) -> str:
        """Write the file whole or not at all."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            raise ServiceUnavailable(
                f"A trajectory could not be written below {self._folder}.",
                why=error.strerror or str(error),
                remedy="Free some space, or set ROLLOUT_PAYLOADS__URL to another place.",
                code=E_PAYLOADS,
            ) from error
        return self.uri(key)

    def get(self, uri: str) -> bytes | None:
        """Read the file."""
        path = Path(unquote(urlsplit(uri).path)).resolve()
        if not path.is_relative_to(self._folder):
            raise ConfigError(f"{uri} is not below the payload folder {self._folder}.")
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ServiceUnavailable(
                f"A trajectory below {self._folder} cannot be read.",
                why=f"{error.strerror or error}: {path.name}",
                remedy="Check the folder's owner and disk, or ROLLOUT_PAYLOADS__URL.",
                code=E_PAYLOADS,
            ) from error

    def uri(self, key: str) -> str:
        """Return a file:// URI."""
        return "file://" + quote(str(self._path(key)))

    def delete_all(self, folder: str) -> int:
        """Delete a folder below ours."""
        path = self._path(folder)
        try:
            count = sum(found.is_file() for found in path.rglob("*"))
            shutil.rmtree(path)
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise ServiceUnavailable(
                f"Trajectories below {path} cannot be deleted.",
                why=f"{error.strerror or error}.",
                remedy="Check the folder's owner and disk, or ROLLOUT_PAYLOADS__URL.",
                code=E_PAYLOADS,
            ) from error
        return count

    def _path(self, key: str) -> Path:
        return self._folder / key


class SealedPayloads:
    """Objects that are signed when they are written, and checked when they are read."""

    def __init__(self, inner: PayloadStore, signer: Signer) -> None:
        self._inner = inner
        self._signer = signer

    def put(self, key: str, data: bytes) -> str:
        """Sign and keep data."""
        return self._inner.put(key, self._signer.seal(data, COMPLETION))

    def get(self, uri: str) -> bytes | None:
        """Return data that we signed.

        Raises:
            Forged: Somebody else wrote it.
        """
        data = self._inner.get(uri)
        return None if data is None else self._signer.open(data, COMPLETION)

    def uri(self, key: str) -> str:
        """Return the URI a key has or would have."""
        return self._inner.uri(key)

    def delete_all(self, folder: str) -> int:
        """Delete whatever has a key `folder/…`, whoever wrote it."""
        return self._inner.delete_all(folder)


class S3Payloads:
    """Objects in a bucket; credentials come from the usual AWS places."""

    def __init__(self, bucket: str, prefix: str, **client_options: Any) -> None:
        import boto3

        self._client = boto3.client("s3", **client_options)
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    def put(self, key: str, data: bytes) -> str:
        """Upload an object."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=data)
        except (BotoCoreError, ClientError) as error:
            raise _s3_unavailable(self._bucket, error) from error
        return self.uri(key)

    def get(self, uri: str) -> bytes | None:
        """Download an object."""
        from botocore.exceptions import BotoCoreError, ClientError

        parts = urlsplit(uri)
        try:
            answer = self._client.get_object(Bucket=parts.netloc, Key=parts.path.lstrip("/"))
            return answer["Body"].read()
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") in ("NoSuchKey", "404"):
                return None
            raise _s3_unavailable(self._bucket, error) from error
        except BotoCoreError as error:
            raise _s3_unavailable(self._bucket, error) from error

    def uri(self, key: str) -> str:
        """Return an s3:// URI."""
        return f"s3://{self._bucket}/{self._prefix}{key}"

    def delete_all(self, folder: str) -> int:
        """Delete objects, as many at once as S3 lists: a thousand."""
        from botocore.exceptions import BotoCoreError, ClientError

        count = 0
        listing = self._client.get_paginator("list_objects_v2")
        try:
            for page in listing.paginate(Bucket=self._bucket, Prefix=f"{self._prefix}{folder}/"):
                if keys := [{"Key": each["Key"]} for each in page.get("Contents", ())]:
                    answer = self._client.delete_objects(
                        Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True}
                    )
                    if failed := answer.get("Errors"):
                        raise _s3_unavailable(self._bucket, RuntimeError(failed[0]["Message"]))
                    count += len(keys)
        except (BotoCoreError, ClientError) as error:
            raise _s3_unavailable(self._bucket, error) from error
        return count


def open_payloads(settings: Settings) -> PayloadStore:
    """Return the payload store the settings name.

    Raises:
        ConfigError: The URL is neither file:// nor s3://.
    """
    store, key = _open_unsigned(settings), settings.broker.signing_key
    return SealedPayloads(store, Signer(key.get_secret_value().encode())) if key else store


def _open_unsigned(settings: Settings) -> PayloadStore:
    url = settings.payloads.url
    if url is None:
        return FolderPayloads(settings.data_dir / "payloads")
    parts = urlsplit(url)
    if parts.scheme == "file":
        return FolderPayloads(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc:
        return S3Payloads(
            parts.netloc,
            parts.path,
            region_name=settings.aws.region,
            endpoint_url=settings.aws.s3_endpoint_url or settings.aws.endpoint_url,
        )
    raise ConfigError(
        f"The payload store {url!r} cannot be used.",
        remedy="Set ROLLOUT_PAYLOADS__URL to file:///folder or s3://bucket/prefix.",
    )


def payload_key(run_id: str, label: str) -> str:
    """Return the key of an attempt's object: known before it exists, so it can be looked for.

    Whatever belongs to a run has its id as the folder, and `delete_all` takes it away.
    """
    return f"{run_id}/{label}.frame"


def check_out(completion: Completion, store: PayloadStore) -> Completion:
    """Leave the body in the store and return the completion with the claim check."""
    key = payload_key(str(completion.run_id), completion.label)
    uri = store.uri(key)
    claimed = completion.model_copy(update={"body_uri": uri, "body_bytes": len(completion.body)})
    store.put(key, encode_completions([claimed]))
    return claimed.model_copy(update={"body": b""})


def load_body(uri: str, store: PayloadStore) -> bytes:
    """Return the body behind a claim check.

    Raises:
        ServiceUnavailable: It is not there.
    """
    frame = store.get(uri)
    if frame is None:
        raise ServiceUnavailable(
            f"The trajectory at {uri} is gone.",
            why="Its object was deleted, or this process looks in another payload store.",
            remedy="Check ROLLOUT_PAYLOADS__URL.",
            code=E_BODY_GONE,
        )
    completions, _ = decode_completions(frame)
    return completions[0].body if completions else b""


def _s3_unavailable(bucket: str, error: Exception) -> ServiceUnavailable:
    return ServiceUnavailable(
        f"The bucket {bucket} does not answer.",
        why=str(error),
        remedy="Check ROLLOUT_PAYLOADS__URL, ROLLOUT_AWS__S3_ENDPOINT_URL and the credentials.",
        code=E_PAYLOADS,
    )
