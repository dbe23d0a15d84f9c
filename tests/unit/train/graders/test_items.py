"""Items against an eval's schema, as the worker checks them."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from train.graders.worker import refused_items


@pytest.fixture
def asked() -> Iterator[tuple[str, list[str]]]:
    """The address of a server, and the paths that it was asked for."""
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"const": "secret"}')

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/schema", paths
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef"])
def test_a_schema_opens_no_address_and_no_file(asked: tuple[str, list[str]], tmp_path: Path, keyword: str) -> None:
    url, paths = asked
    (tmp_path / "secret.json").write_text(json.dumps({"const": "secret"}))
    for reference in (url, f"file://{tmp_path}/secret.json", "secret.json", "https://json-schema.org/nosuch"):
        ((place, why),) = refused_items({"$id": "http://a/b", keyword: reference}, [{"a": 1}])
        assert place == -1 and "leads nowhere" in why and "'secret'" not in why
    assert paths == []


def test_a_schema_may_lead_to_a_place_of_its_own() -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
    assert refused_items(schema, [{"a": 1}, {"a": "x"}]) == [(1, "item.a: 'x' is not of type 'integer'")]


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"$ref": "#"}, "refers to itself without end"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "refers to itself without end"),
        ({"pattern": "(("}, "is not a 'regex'"),
        ({"type": "object", "properties": {"a": {"required": True}}}, "at properties.a.required"),
    ],
)
def test_what_is_no_schema_is_said_in_words(schema: dict[str, Any], why: str) -> None:
    ((place, told),) = refused_items(schema, ["a"])
    assert place == -1 and why in told
