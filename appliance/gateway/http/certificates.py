"""Loads the endpoint's TLS certificate, reloads it from its files at run time, and warns before it expires.

It loads each pair of files into a new context before any connection uses it: loading into the one in use would combine
a new certificate with an old key if the second file is still missing. The listening context passes each new connection
to the newest context.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
import time
from typing import Any

from cryptography import x509

from appliance.gateway.core.errors import ConfigInvalid
from runtime.moments import minute

log = logging.getLogger("appliance.gateway")

LOOK_EVERY_S = 2.0
SAID_BEFORE_S = 14 * 86400.0
MOST_BYTES = 1 << 20


class Certificate:
    """context: for listening. expires_s: Unix time, of the current certificate. fault: why the files' certificate is
    not in use, "" if it is."""

    def __init__(self, cert_path: str, key_path: str) -> None:
        """Raises ConfigInvalid."""
        self._cert_path, self._key_path = cert_path, key_path
        self.fault = ""
        try:
            self._seen = self._stat()
            self._newest, _, self.expires_s = self._load()
        except (OSError, ssl.SSLError, ValueError) as error:
            raise ConfigInvalid(
                f"tls_cert_path {cert_path!r}, tls_key_path {key_path!r}: "
                f"cannot be used ({error}), expected a PEM certificate chain and its unencrypted key"
            ) from error
        self.context = self._newest
        # Called for every new connection, also for those that name no server.
        self.context.sni_callback = self._hand_over
        self._next_look_s = 0.0

    def look(self, now_s: float, *, at_once: bool = False) -> bool:
        """Load the files if they are not those in force; return whether anything changed. now_s: the monotonic
        clock."""
        if not at_once and now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + LOOK_EVERY_S
        before, in_force, fault = self.fault, self._seen, ""
        try:
            seen = self._stat()
            if seen != in_force:
                newest, begins_s, expires_s = self._load()
                if not begins_s <= time.time() <= expires_s:
                    raise ValueError(f"it is valid from {minute(begins_s)} until {minute(expires_s)}")
                self._seen, self._newest, self.expires_s = seen, newest, expires_s
                log.info("a new certificate is in force, until %s", minute(expires_s))
        except (OSError, ssl.SSLError, ValueError) as error:
            fault = f"{type(error).__name__}: {error}"
            if fault != before:
                log.error("the new certificate in %s cannot be loaded, the old one stays: %s", self._cert_path, error)
        self.fault = fault
        return fault != before or self._seen != in_force

    def notes(self, now_s: float) -> list[str]:
        """now_s: Unix time."""
        notes = []
        if self.fault:
            notes.append(
                f"the endpoint's new certificate in {self._cert_path} cannot be loaded, the old one stays: {self.fault}"
            )
        left_s = self.expires_s - now_s
        if left_s <= SAID_BEFORE_S:
            when = f"expires in {left_s / 86400:.1f} days, at" if left_s > 0 else "has expired, at"
            notes.append(
                f"the endpoint's certificate {when} {minute(self.expires_s)}; a new one in {self._cert_path} "
                "is loaded without a restart"
            )
        return notes

    def _hand_over(self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: Any) -> None:
        if connection.context is not self._newest:
            connection.context = self._newest

    def _stat(self) -> tuple[tuple[int, int, int], ...]:
        """Raises ValueError for what would hold up everybody's requests while it is read, as a pipe does."""
        found = [os.stat(path) for path in (self._cert_path, self._key_path)]
        if not all(stat.S_ISREG(one.st_mode) and one.st_size <= MOST_BYTES for one in found):
            raise ValueError(f"one of the files is not a regular one of at most {MOST_BYTES} bytes")
        return tuple((one.st_mtime_ns, one.st_ino, one.st_size) for one in found)

    def _load(self) -> tuple[ssl.SSLContext, float, float]:
        """The context, and from when until when its certificate is valid, in Unix time."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # An encrypted key must fail instead of prompting on a terminal for its password.
        context.load_cert_chain(self._cert_path, self._key_path, password="")
        with open(self._cert_path, "rb") as file:
            own = x509.load_pem_x509_certificates(file.read())[0]
        return context, own.not_valid_before_utc.timestamp(), own.not_valid_after_utc.timestamp()
