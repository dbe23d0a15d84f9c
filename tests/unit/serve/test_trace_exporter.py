"""Engines tell a collector of their spans; what it answers takes them no memory."""

from __future__ import annotations

import socket
import threading

from serve.vllm import patches


def test_of_what_a_collector_answers_an_engine_reads_the_head_alone():
    server, sent = socket.create_server(("127.0.0.1", 0)), 0

    def serve() -> None:
        nonlocal sent
        client, _ = server.accept()
        with client:
            client.recv(65536)
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            try:
                while sent < 64 << 20:
                    client.sendall(bytes(1 << 20))
                    sent += 1 << 20
            except OSError:
                return

    answering = threading.Thread(target=serve)
    answering.start()
    exporter = patches._span_exporter(f"http://127.0.0.1:{server.getsockname()[1]}/v1/traces")
    told = exporter._client.export(b"spans")
    answering.join()
    server.close()
    assert told.success and sent < 32 << 20
