"""`appliance chat`: talk to a model in the terminal."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.cli import output
from appliance.cli.command import Session, command
from appliance.cli.errors import BadUsage
from appliance.cli.options import number, opt, picked

if TYPE_CHECKING:
    from appliance.cli.client import Client

PATH = "/v1/chat/completions"
# A held request may wait for an engine to wake; the box itself answers 503 when it gives up.
TIMEOUT_S = 900.0


@command(
    "chat",
    opt("model MODEL"),
    opt("prompt PROMPT", nargs="?"),
    opt("--system TEXT", "A system message to begin with."),
    opt("--max-tokens N", "The longest answer, in tokens.", type=number(int, 1), default=512),
    opt("--temperature X", "0: the same answer every time. Default: the model's.", type=number(float, 0, 2)),
)
def chat(session: Session, args: Namespace) -> None:
    """Talk to a model in the terminal: one question with a PROMPT, a conversation without.

    Examples:
      appliance chat smollm2-135m                        a conversation; an empty line or Ctrl-D ends it
      appliance chat smollm2-135m "2+2?" --max-tokens 20 --temperature 0 -o json
    """
    interactive = args.prompt is None and sys.stdin.isatty()
    if session.as_json and interactive:
        raise BadUsage("-o json needs a PROMPT, or one on stdin")
    body = picked(args, "model max_tokens temperature")
    messages = body["messages"] = [{"role": "system", "content": args.system}] if args.system else []
    gateway = endpoint(session)
    if interactive:
        output.say(f"talking to {args.model}; an empty line or Ctrl-D ends it")
        while text := _typed():
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": _answer(gateway, body)})
        return
    text = sys.stdin.read() if args.prompt is None else args.prompt
    if not text.strip():
        raise BadUsage("the prompt is empty")
    messages.append({"role": "user", "content": text})
    if session.as_json:
        output.print_json(gateway.send("POST", PATH, body=body, timeout_s=TIMEOUT_S))
    else:
        _answer(gateway, body)


def _typed() -> str:
    """A line from the terminal, "" at its end."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _answer(gateway: Client, body: dict[str, Any]) -> str:
    """Print the answer as it comes, and say why there is none or why it ends early; returns it whole."""
    pieces, ended = [], None
    try:
        for event in gateway.stream_events(PATH, {**body, "stream": True}, TIMEOUT_S):
            for choice in event.get("choices", ()):
                piece = (choice.get("delta") or {}).get("content") or ""
                ended = choice.get("finish_reason") or ended
                pieces.append(piece)
                print(output.printable(piece), end="", flush=True)
    finally:
        if pieces:
            print(flush=True)
    answer = "".join(pieces)
    if ended == "length":
        output.say(f"(cut off: {body['max_tokens']} tokens, see --max-tokens, or the model's context is full)")
    elif not answer.strip():
        output.say("(the model ended its answer at once)")
    return answer


def endpoint(session: Session) -> Client:
    """The box's endpoint. A command on the box itself needs no key: it asks as the box does."""
    from appliance.cli.client import Client  # late, see appliance.cli.command

    if (box := session.box_file) is None:
        return session.client
    asking = str(Path(box.controller_socket()).with_name("asking.sock"))
    return Client(socket_path=asking, why_silent=box.why_silent)
