"""The cut in conftest.py holds: a test that reaches out fails instead of passing online only."""

from __future__ import annotations

import re
import socket

import pytest


def test_connections_and_datagrams_to_another_machine_are_refused() -> None:
    for family, host in ((socket.AF_INET, "203.0.113.1"), (socket.AF_INET6, "2001:db8::1")):
        refused = pytest.raises(RuntimeError, match=re.escape(host))
        with socket.socket(family, socket.SOCK_STREAM) as connection, refused:
            connection.connect((host, 80))
    refused = pytest.raises(RuntimeError, match="offline")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection, refused:
        connection.sendto(b"", ("203.0.113.1", 53))


def test_this_machine_stays_reachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        with connection, server.accept()[0] as accepted:
            connection.sendall(b"ping")
            assert accepted.recv(4) == b"ping"
