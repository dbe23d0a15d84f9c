"""Loads the endpoint's TLS certificate, reloads it when its files change, and warns before it expires."""

from __future__ import annotations

import logging
import os
import ssl

from appliance.gateway.core.errors import ConfigInvalid
from runtime.logs import minute

log = logging.getLogger("appliance.gateway")

WARN_BEFORE_S = 14 * 86400.0


class Certificate:
    """The endpoint's certificate. context: TLS context for listening. expires_s: its expiry in Unix time. fault: why
    the current files are not in use, "" if they are in use. Raises ConfigInvalid."""

    def __init__(self, cert_path: str, key_path: str) -> None:
        self._paths, self._seen, self.expires_s = (cert_path, key_path), [0], 0.0
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.reload_changed()
        if self.fault:
            raise ConfigInvalid(
                f"tls_cert_path {cert_path!r}, tls_key_path {key_path!r}: "
                f"cannot be used ({self.fault}), expected a PEM certificate chain and its unencrypted key"
            )

    def reload_changed(self) -> None:
        """Load changed files, but only a matching pair: a half renewed pair would break new connections."""
        stamps = [os.stat(path).st_mtime_ns if os.path.exists(path) else 0 for path in self._paths]
        if stamps == self._seen:
            return
        from cryptography import x509  # imported here: it takes 0.1 s, and most gateways have no certificate

        self._seen, self.fault = stamps, ""
        try:
            for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):
                # An encrypted key must fail instead of prompting on a terminal for its password.
                context.load_cert_chain(*self._paths, password="")
            with open(self._paths[0], "rb") as file:
                self.expires_s = x509.load_pem_x509_certificates(file.read())[0].not_valid_after_utc.timestamp()
            log.info("loaded the certificate in %s, valid until %s", self._paths[0], minute(self.expires_s))
        except (OSError, ValueError) as error:
            self.fault = f"{type(error).__name__}: {error}"
            log.error("the certificate in %s cannot be loaded: %s", self._paths[0], self.fault)

    def notes(self, now_s: float) -> list[str]:
        """Return notes on failed reloads and on a close expiry. now_s: Unix time."""
        left_s, path, notes = self.expires_s - now_s, self._paths[0], []
        if self.fault:
            notes.append(f"the endpoint's new certificate in {path} cannot be loaded, the old one stays: {self.fault}")
        if left_s <= WARN_BEFORE_S:
            when = f"expires in {left_s / 86400:.1f} days, at" if left_s > 0 else "has expired, at"
            remedy = f"a new one in {path} is loaded without a restart"
            notes.append(f"the endpoint's certificate {when} {minute(self.expires_s)}; {remedy}")
        return notes
