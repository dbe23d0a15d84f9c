"""Loads the endpoint's TLS certificate, takes up a renewed one from its files, and warns before it expires."""

from __future__ import annotations

import logging
import os
import ssl

from cryptography import x509

from appliance.gateway.core.errors import ConfigInvalid
from runtime.moments import minute

log = logging.getLogger("appliance.gateway")

SAID_BEFORE_S = 14 * 86400.0


class Certificate:
    """context: for listening. expires_s: Unix time, of the current certificate. fault: why the files' certificate is
    not in use, "" if it is."""

    def __init__(self, cert_path: str, key_path: str) -> None:
        """Raises ConfigInvalid."""
        self._cert_path, self._key_path = cert_path, key_path
        self.fault = ""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._seen = self._stamps()
        try:
            self._load()
        except (OSError, ValueError) as error:
            raise ConfigInvalid(
                f"tls_cert_path {cert_path!r}, tls_key_path {key_path!r}: "
                f"cannot be used ({error}), expected a PEM certificate chain and its unencrypted key"
            ) from error

    def reload_changed(self) -> None:
        """Load the files if they have changed."""
        if (stamps := self._stamps()) == self._seen:
            return
        self._seen = stamps
        try:
            self._load()
            self.fault = ""
            log.info("a new certificate is in force, until %s", minute(self.expires_s))
        except (OSError, ValueError) as error:
            self.fault = f"{type(error).__name__}: {error}"
            log.error("the new certificate in %s cannot be loaded, the old one stays: %s", self._cert_path, error)

    def notes(self, now_s: float) -> list[str]:
        """now_s: Unix time."""
        left_s, notes = self.expires_s - now_s, []
        if self.fault:
            notes.append(
                f"the endpoint's new certificate in {self._cert_path} cannot be loaded, the old one stays: {self.fault}"
            )
        if left_s <= SAID_BEFORE_S:
            when = f"expires in {left_s / 86400:.1f} days, at" if left_s > 0 else "has expired, at"
            notes.append(
                f"the endpoint's certificate {when} {minute(self.expires_s)}; a new one in {self._cert_path} "
                "is loaded without a restart"
            )
        return notes

    def _stamps(self) -> list[int]:
        return [os.stat(path).st_mtime_ns if os.path.exists(path) else 0 for path in (self._cert_path, self._key_path)]

    def _load(self) -> None:
        """Load into the listening context only a pair that fits: half of a renewal would end new connections."""
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):
            # An encrypted key must fail instead of prompting on a terminal for its password.
            context.load_cert_chain(self._cert_path, self._key_path, password="")
        with open(self._cert_path, "rb") as file:
            own = x509.load_pem_x509_certificates(file.read())[0]
        self.expires_s = own.not_valid_after_utc.timestamp()
