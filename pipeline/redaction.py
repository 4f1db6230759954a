"""Removes secrets from stored, sent and logged text.

Entry points make a `Redactor` from settings and environment; the worker applies it to errors,
trajectories and log lines. It replaces a secret in text, in JSON and in URLs. Must not change words
that are no secret, such as well-known default passwords.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, SecretStr

from pipeline.contract.url_secrets import MASK, passwords_in

#: Shorter secrets, and those in `_WELL_KNOWN`, also occur as ordinary words, so they stay.
_MIN_CHARS = 8
_WELL_KNOWN = frozenset(
    {"password", "postgres", "rabbitmq", "not-needed", "placeholder", "no-key-needed", "dummy-key"}
)
#: Keys of attempts for a gateway (`pipeline/queue/gateway_keys.py`); no setting holds them.
_GATEWAY_KEY = re.compile(r"rpk-[A-Za-z0-9_-]+\.[0-9a-f]+")
_GATEWAY_KEY_BYTES = re.compile(_GATEWAY_KEY.pattern.encode())
_SECRET_ENDINGS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD", "_PASSWD", "_CREDENTIALS")


class Redactor:
    """Replaces secrets in text and in JSON bytes, and every gateway key.

    Args:
        secrets: Texts to replace.
        passwords: Passwords of URLs. They are always replaced in URLs, and elsewhere unless they
            are common words.
    """

    def __init__(self, secrets: Iterable[str] = (), passwords: Iterable[str] = ()) -> None:
        given = set(passwords)
        whole = {s for s in {*secrets, *given} if _is_secret(s)}
        pairs = {form: MASK for secret in whole for form in _forms(secret)}
        for password in given - whole:
            for form in (password, quote(password, safe="")):
                pairs[f":{form}@"] = f":{MASK}@"
        # Longest first, because one secret may be the beginning of another.
        ordered = sorted(pairs.items(), key=lambda pair: (-len(pair[0]), pair[0]))
        self._texts = ordered
        self._bytes = [(form.encode(), mask.encode()) for form, mask in ordered]

    @classmethod
    def of(cls, settings: BaseModel, environ: Mapping[str, str]) -> Redactor:
        """Make a redactor of the secrets in settings and environment."""
        return cls.of_environment(environ, _secrets_in(settings))

    @classmethod
    def of_environment(cls, environ: Mapping[str, str], known: Iterable[str] = ()) -> Redactor:
        """Make a redactor of the secrets in the environment and of known ones."""
        secrets = set(known)
        for name, value in environ.items():
            if name.upper().endswith(_SECRET_ENDINGS) or "://" in value:
                secrets.add(value)
        passwords = {password for value in secrets for password in passwords_in(value)}
        return cls({value for value in secrets if "://" not in value}, passwords)

    def text(self, text: str) -> str:
        """Return text without secrets."""
        for secret, mask in self._texts:
            if secret in text:
                text = text.replace(secret, mask)
        return _GATEWAY_KEY.sub(MASK, text)

    def data(self, data: bytes) -> bytes:
        """Return JSON, or any UTF-8, without secrets."""
        for secret, mask in self._bytes:
            if secret in data:
                data = data.replace(secret, mask)
        return _GATEWAY_KEY_BYTES.sub(MASK.encode(), data)


#: Knows no secrets, so it removes gateway keys only.
NOTHING = Redactor()


def redact_logs(redactor: Redactor) -> None:
    """Remove secrets from every later log record of this process."""
    known = logging.getLogRecordFactory()
    make = known.make if isinstance(known, _RedactingFactory) else known
    logging.setLogRecordFactory(_RedactingFactory(make, redactor))


class _RedactingFactory:
    def __init__(self, make: Any, redactor: Redactor) -> None:
        self.make = make
        self._redactor = redactor

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record: logging.LogRecord = self.make(*args, **kwargs)
        try:
            message = record.getMessage()
        except (TypeError, ValueError, KeyError):
            return record  # logging itself reports the wrong arguments
        redacted = self._redactor.text(message)
        if redacted != message:
            record.msg, record.args = redacted, ()
        if record.exc_info and record.exc_info[0] is not None:
            # Formatters use this text instead of formatting the exception again.
            text = logging.Formatter().formatException(record.exc_info)
            record.exc_text = self._redactor.text(text)
        return record


def _is_secret(text: str) -> bool:
    return len(text) >= _MIN_CHARS and text.lower() not in _WELL_KNOWN


def _forms(secret: str) -> set[str]:
    """Return the forms of a secret in text, in a URL, in JSON, and in JSON within JSON."""
    forms = {secret}
    for _ in range(2):
        forms |= {json.dumps(f, ensure_ascii=ascii)[1:-1] for f in forms for ascii in (False, True)}
    return forms | {quote(secret, safe="")}


def _secrets_in(value: Any) -> Iterable[str]:
    if isinstance(value, SecretStr):
        yield value.get_secret_value()
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _secrets_in(getattr(value, name))
    elif isinstance(value, tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _secrets_in(each)
