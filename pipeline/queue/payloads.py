"""The payload store, for bodies that do not travel in messages: a folder, or S3.

Workers write an object before they send its URI; trainers, the reconciler and the command line read
it. An object holds a whole frame, so the outcome of a lost message can be recovered from it. Must
not: know the trajectory store.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote, urlsplit

from pipeline.contract.errors import ConfigError, ServiceUnavailable
from pipeline.contract.url_secrets import hide_passwords, without_passwords
from pipeline.queue.signing import COMPLETION, Signer
from pipeline.settings import Settings

E_PAYLOADS = "E203"  #: the store does not answer, or its disk is full

_UNFINISHED = ".writing-"  #: prefix of files that are not complete yet


class PayloadStore(Protocol):
    """Keeps bytes under a key; a second write replaces the first."""

    def put(self, key: str, data: bytes) -> str:
        """Keep data and return its URI."""
        ...

    def get(self, uri: str) -> bytes | None:
        """Return the data; None if there is no object."""
        ...

    def uri(self, key: str) -> str:
        """Return the URI a key has or would have."""
        ...

    def find(self, prefix: str) -> Iterator[str]:
        """Yield the URIs of the objects whose key begins with `folder/…`."""
        ...

    def delete_all(self, folder: str) -> int:
        """Delete all objects with a key `folder/…`; return their number."""
        ...


class FolderPayloads:
    """Objects as files below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    def put(self, key: str, data: bytes) -> str:
        """Write the file atomically and durably."""
        path = self._folder / key
        with _disk_errors(f"A trajectory could not be written below {self._folder}."):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_UNFINISHED)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
            # The name is durable only with its folder, and that one with the folders above it.
            for folder in path.parents[: len(path.relative_to(self._folder).parts)]:
                _sync_folder(folder)
        return self.uri(key)

    def get(self, uri: str) -> bytes | None:
        """Read the file."""
        path = Path(unquote(urlsplit(uri).path)).resolve()
        if not path.is_relative_to(self._folder):
            raise ConfigError(f"{uri} is not below the payload folder {self._folder}.")
        with _disk_errors(f"The trajectory {path.name} below {self._folder} cannot be read."):
            try:
                return path.read_bytes()
            except FileNotFoundError:
                return None

    def uri(self, key: str) -> str:
        """Return a file:// URI."""
        return "file://" + quote(str(self._folder / key))

    def find(self, prefix: str) -> Iterator[str]:
        """Search the folder that the prefix names, and those below it."""
        top = self._folder / prefix.rpartition("/")[0]
        with _disk_errors(f"The trajectories below {top} cannot be listed."):
            for parent, _, names in os.walk(top, onerror=_raise_unless_missing):
                below = Path(parent).relative_to(self._folder)
                keys = (f"{below}/{name}" for name in names if not name.startswith(_UNFINISHED))
                yield from (self.uri(key) for key in keys if key.startswith(prefix))

    def delete_all(self, folder: str) -> int:
        """Delete a folder below this store's."""
        path = self._folder / folder
        with _disk_errors(f"Trajectories below {path} cannot be deleted."):
            try:
                count = sum(found.is_file() for found in path.rglob("*"))
                shutil.rmtree(path)
            except FileNotFoundError:
                return 0
        return count


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


@contextmanager
def _disk_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ServiceUnavailable(
            what,
            why=f"{error.strerror or error}.",
            remedy="Free some space, check the folder's owner, or set ROLLOUT_PAYLOADS__URL to "
            "another place.",
            code=E_PAYLOADS,
        ) from error


class SealedPayloads:
    """Objects that are signed when written and checked when read."""

    def __init__(self, inner: PayloadStore, signer: Signer) -> None:
        self._inner = inner
        self._signer = signer

    def put(self, key: str, data: bytes) -> str:
        """Sign and keep data."""
        return self._inner.put(key, self._signer.seal(data, COMPLETION))

    def get(self, uri: str) -> bytes | None:
        """Return data without its signature.

        Raises:
            Forged: The object is not signed with this deployment's key.
        """
        data = self._inner.get(uri)
        return None if data is None else self._signer.open(data, COMPLETION)

    def uri(self, key: str) -> str:
        """Return the URI a key has or would have."""
        return self._inner.uri(key)

    def find(self, prefix: str) -> Iterator[str]:
        """Yield the URIs of the objects whose key begins with `folder/…`, signed or not."""
        return self._inner.find(prefix)

    def delete_all(self, folder: str) -> int:
        """Delete all objects with a key `folder/…`, signed or not."""
        return self._inner.delete_all(folder)


class S3Payloads:
    """Objects in a bucket; credentials come from the usual AWS sources."""

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        connect_timeout_s: float = 5,
        network_timeout_s: float = 20,
        **client_options: Any,
    ) -> None:
        import boto3
        from botocore.config import Config

        config = Config(
            connect_timeout=connect_timeout_s,
            read_timeout=network_timeout_s,
            retries={"total_max_attempts": 3, "mode": "standard"},
            tcp_keepalive=True,
        )
        self._client = boto3.client("s3", config=config, **client_options)
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    def put(self, key: str, data: bytes) -> str:
        """Upload an object."""
        with self._errors():
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=data)
        return self.uri(key)

    def get(self, uri: str) -> bytes | None:
        """Download an object."""
        from botocore.exceptions import ClientError

        parts = urlsplit(uri)
        with self._errors():
            try:
                response = self._client.get_object(Bucket=parts.netloc, Key=parts.path.lstrip("/"))
                return response["Body"].read()
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") in ("NoSuchKey", "404"):
                    return None
                raise

    def uri(self, key: str) -> str:
        """Return an s3:// URI."""
        return f"s3://{self._bucket}/{self._prefix}{key}"

    def find(self, prefix: str) -> Iterator[str]:
        """List the objects, a page (a thousand) per call."""
        for keys in self._pages(prefix):
            yield from (f"s3://{self._bucket}/{key}" for key in keys)

    def delete_all(self, folder: str) -> int:
        """Delete objects, one page of the listing per call."""
        count = 0
        with self._errors():
            for found in self._pages(f"{folder}/"):
                if keys := [{"Key": key} for key in found]:
                    response = self._client.delete_objects(
                        Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True}
                    )
                    if failed := response.get("Errors"):
                        raise self._unavailable(failed[0]["Message"])
                    count += len(keys)
        return count

    def _pages(self, prefix: str) -> Iterator[list[str]]:
        listing = self._client.get_paginator("list_objects_v2")
        with self._errors():
            for page in listing.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix):
                yield [each["Key"] for each in page.get("Contents", ())]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError) as error:
            # The error's own text may hold the endpoint's password, so it is no cause.
            why = without_passwords(str(error), self._client.meta.endpoint_url)
            raise self._unavailable(why) from None

    def _unavailable(self, why: str) -> ServiceUnavailable:
        return ServiceUnavailable(
            f"The bucket {self._bucket} does not answer.",
            why=why,
            remedy="Check ROLLOUT_PAYLOADS__URL, ROLLOUT_AWS__S3_ENDPOINT_URL and the credentials.",
            code=E_PAYLOADS,
        )


def open_payloads(settings: Settings) -> PayloadStore:
    """Return the payload store the settings name.

    Raises:
        ConfigError: The URL is neither file:// nor s3://.
    """
    store, key = _open_unsigned(settings), settings.broker.signing_key
    return SealedPayloads(store, Signer(key.get_secret_value().encode())) if key else store


def _open_unsigned(settings: Settings) -> PayloadStore:
    if settings.payloads.url is None:
        return FolderPayloads(settings.data_dir / "payloads")
    url = settings.payloads.url.get_secret_value()
    parts = urlsplit(url)
    if parts.scheme == "file":
        return FolderPayloads(Path(unquote(parts.path)))
    # S3 credentials never stand in the URL: it is stored with every trajectory.
    if parts.scheme == "s3" and parts.netloc and "@" not in parts.netloc:
        return S3Payloads(
            parts.netloc,
            parts.path,
            region_name=settings.aws.region,
            endpoint_url=settings.aws.s3_endpoint,
            connect_timeout_s=settings.payloads.connect_timeout_s,
            network_timeout_s=settings.payloads.network_timeout_s,
        )
    raise ConfigError(
        f"The payload store {hide_passwords(url)!r} cannot be used.",
        remedy="Set ROLLOUT_PAYLOADS__URL to file:///folder or s3://bucket/prefix.",
    )
