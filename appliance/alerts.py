"""Sends each problem of the box by webhook and e-mail: when it begins, daily while it lasts, and when it ends."""

from __future__ import annotations

import smtplib
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from email.message import EmailMessage
from email.utils import localtime
from pathlib import Path
from typing import Any, Final, Literal

import httpx

from appliance.config import AlertSettings

SETTLE_S: Final = 240.0
"""Shorter problems are not reported, and shorter gaps do not end a problem."""
TIMEOUT_S: Final = 20.0
Event = Literal["problem", "reminder", "resolved", "test"]
Channel = Literal["webhook", "e-mail"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of the box. `id`: constant while the problem lasts. `remedy`: what to do. `is_event`: the problem
    happened once, such as a failed job, and has no reminder and no end."""

    id: str
    text: str
    remedy: str = ""
    is_event: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    event: Event
    id: str
    text: str
    remedy: str = ""

    def subject(self, box: str) -> str:
        return f"[{box}] {self.event}: {self.text.splitlines()[0][:120]}"

    def body(self, box: str) -> str:
        return self.subject(box) + (f"\nWhat to do: {self.remedy}" if self.remedy else "")


class Undelivered(Exception):
    """A message was not delivered; the text has the channel and the reason."""


Known = dict[str, dict[str, Any]]
"""Problems by id: {"text", "is_event", "began_s", "seen_s", "sent_s": Unix time of its newest message or None}."""


def step(problems: Iterable[Problem], known: Known, now_s: float, repeat_s: float) -> tuple[Known, list[Message]]:
    """Return the new state of known problems, and the messages to send. Pure."""
    kept: Known = {}
    messages: list[Message] = []
    for problem in problems:
        row = known.get(problem.id, {"began_s": now_s, "sent_s": None})
        row = {**row, "text": problem.text, "is_event": problem.is_event, "seen_s": now_s}
        kept[problem.id] = row
        if row["sent_s"] is None and (problem.is_event or now_s - row["began_s"] >= SETTLE_S):
            messages.append(Message("problem", problem.id, problem.text, problem.remedy))
        elif row["sent_s"] is not None and not problem.is_event and now_s - row["sent_s"] >= repeat_s:
            messages.append(Message("reminder", problem.id, problem.text, problem.remedy))
    for name, row in known.items():
        if name in kept:
            continue
        if now_s - row["seen_s"] < SETTLE_S:
            kept[name] = row
        elif row["sent_s"] is not None and not row["is_event"]:
            messages.append(Message("resolved", name, row["text"]))
    return kept, messages


def channels(settings: AlertSettings) -> tuple[Channel, ...]:
    """Return the channels that have a configured receiver."""
    receivers: dict[Channel, Any] = {"webhook": settings.webhook, "e-mail": settings.email}
    return tuple(channel for channel, receiver in receivers.items() if receiver)


def send(settings: AlertSettings, channel: Channel, message: Message, box: str) -> None:
    """Send a message over one channel; blocks. Raises Undelivered."""
    try:
        (_post if channel == "webhook" else _mail)(settings, message, box)
    except (httpx.HTTPError, httpx.InvalidURL, smtplib.SMTPException, OSError) as error:
        raise Undelivered(f"{channel}: {type(error).__name__}: {error}") from error


def webhook_body(settings: AlertSettings, message: Message, box: str) -> Mapping[str, Any]:
    """Return the JSON body that the configured chat service expects from a webhook."""
    text = message.body(box)
    match settings.webhook_format:
        case "slack":
            return {"text": text}
        case "wecom":  # DingTalk's robots accept the same body
            return {"msgtype": "text", "text": {"content": text}}
        case "feishu":
            return {"msg_type": "text", "content": {"text": text}}
    return {"box": box, **asdict(message)}


def _post(settings: AlertSettings, message: Message, box: str) -> None:
    assert settings.webhook is not None
    answer = httpx.post(settings.webhook, json=webhook_body(settings, message, box), timeout=TIMEOUT_S)
    answer.raise_for_status()


def _mail(settings: AlertSettings, message: Message, box: str) -> None:
    mail = EmailMessage()
    mail["Subject"], mail["From"] = message.subject(box), settings.email_from
    mail["To"], mail["Date"] = ", ".join(settings.email), localtime()  # mails without a date may be treated as spam
    mail.set_content(message.body(box))
    security, at = settings.smtp_security, (settings.smtp_host, settings.smtp_port)
    context = ssl.create_default_context()
    with (
        smtplib.SMTP_SSL(*at, timeout=TIMEOUT_S, context=context)
        if security == "tls"
        else smtplib.SMTP(*at, timeout=TIMEOUT_S)
    ) as server:
        if security == "starttls":
            server.starttls(context=context)
        if settings.smtp_user and settings.smtp_password_path:
            server.login(settings.smtp_user, Path(settings.smtp_password_path).read_text().strip())
        server.send_message(mail)
