"""The cut in conftest.py holds: a test that reaches out fails instead of passing online only."""

from __future__ import annotations

import re
import socket

import pytest


@pytest.mark.parametrize("address", ["203.0.113.1", "2001:db8::1"])
def test_a_connection_to_another_machine_is_refused(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with (
        socket.socket(family, socket.SOCK_STREAM) as connection,
        pytest.raises(RuntimeError, match=re.escape(address)),
    ):
        connection.connect((address, 80))


def test_a_datagram_to_another_machine_is_refused() -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection,
        pytest.raises(RuntimeError, match="offline"),
    ):
        connection.sendto(b"", ("203.0.113.1", 53))


def test_this_machine_stays_reachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        with connection, server.accept()[0] as accepted:
            connection.sendall(b"ping")
            assert accepted.recv(4) == b"ping"
