"""Secrets are taken out of what is stored, sent and logged.

Made at entry points of the settings and the environment; used by the worker on error messages and
trajectories, and on every log line. What it knows is replaced wherever it stands as text, in JSON
or in a URL. Must not: touch words that are no secret, such as the passwords that everybody knows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from pydantic import BaseModel, SecretStr

MASK = "***"

#: Shorter ones, and those in `_WELL_KNOWN`, would be found in text that is not about them.
_MIN_CHARS = 8
_WELL_KNOWN = frozenset(
    {"password", "postgres", "rabbitmq", "not-needed", "placeholder", "no-key-needed", "dummy-key"}
)
_SECRET_ENDINGS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD", "_PASSWD", "_CREDENTIALS")


class Redactor:
    """Replaces secrets in text and in JSON bytes.

    Args:
        secrets: Texts that nobody may read.
        passwords: Passwords of URLs: replaced there, whatever they are, and elsewhere if they are
            no common word.
    """

    def __init__(self, secrets: Iterable[str] = (), passwords: Iterable[str] = ()) -> None:
        given = set(passwords)
        whole = {s for s in {*secrets, *given} if _is_secret(s)}
        pairs = {form: MASK for secret in whole for form in _forms(secret)}
        for password in given - whole:
            for form in (password, quote(password, safe="")):
                pairs[f":{form}@"] = f":{MASK}@"
        # Longest first: one secret may be the beginning of another.
        ordered = sorted(pairs.items(), key=lambda pair: (-len(pair[0]), pair[0]))
        self._texts = ordered
        self._bytes = [(form.encode(), mask.encode()) for form, mask in ordered]

    @classmethod
    def of(cls, settings: BaseModel, environ: Mapping[str, str]) -> Redactor:
        """Return what knows the secrets of settings and environment."""
        secrets = set(_secrets_in(settings))
        for name, value in environ.items():
            if name.upper().endswith(_SECRET_ENDINGS) or "://" in value:
                secrets.add(value)
        passwords = {password for value in secrets for password in _passwords_in(value)}
        return cls({value for value in secrets if "://" not in value}, passwords)

    def text(self, text: str) -> str:
        """Return text without secrets."""
        for secret, mask in self._texts:
            if secret in text:
                text = text.replace(secret, mask)
        return text

    def data(self, data: bytes) -> bytes:
        """Return JSON, or any UTF-8, without secrets."""
        for secret, mask in self._bytes:
            if secret in data:
                data = data.replace(secret, mask)
        return data


#: Knows no secrets.
NOTHING = Redactor()


def redact_logs(redactor: Redactor) -> None:
    """Take secrets out of every log record of this process from now on."""
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
            return record  # a wrong call of the logger: logging itself reports it
        redacted = self._redactor.text(message)
        if redacted != message:
            record.msg, record.args = redacted, ()
        if record.exc_info and record.exc_info[0] is not None:
            # Formatters take this instead of formatting the exception themselves.
            text = logging.Formatter().formatException(record.exc_info)
            record.exc_text = self._redactor.text(text)
        return record


def _is_secret(text: str) -> bool:
    return len(text) >= _MIN_CHARS and text.lower() not in _WELL_KNOWN


def _forms(secret: str) -> set[str]:
    """Return the secret as it stands in text, in a URL, in JSON, and in JSON within JSON."""
    forms = {secret}
    for _ in range(2):
        forms |= {json.dumps(f, ensure_ascii=ascii)[1:-1] for f in forms for ascii in (False, True)}
    return forms | {quote(secret, safe="")}


def _secrets_in(model: BaseModel) -> Iterable[str]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, SecretStr):
            yield value.get_secret_value()
        elif isinstance(value, BaseModel):
            yield from _secrets_in(value)


def _passwords_in(value: str) -> Iterable[str]:
    if "://" not in value:
        return
    try:
        password = urlsplit(value).password
    except ValueError:
        return
    if password:
        yield password
        yield unquote(password)
