"""Ports on which rank 0 listens: each is free, and no outgoing connection of another process takes it."""

import socket
from pathlib import Path

import pytest

from scripts.common import process

pytestmark = pytest.mark.forked("python")


def test_ports_are_different_and_below_those_of_outgoing_connections():
    ports = [int(process.free_port()) for _ in range(100)]
    assert len(set(ports)) == 100
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports) < first_outgoing


def test_a_port_on_which_something_listens_is_left_out():
    next_port = int(process.free_port()) + 1
    with socket.socket() as taken:
        taken.bind(("localhost", next_port))
        taken.listen()
        assert int(process.free_port()) != next_port


def test_a_port_that_another_process_has_got_is_left_out():
    port = int(process.free_port())
    with socket.socket(type=socket.SOCK_DGRAM) as other, pytest.raises(OSError, match="in use"):
        other.bind(("localhost", port))
    with socket.socket(type=socket.SOCK_DGRAM) as reservation:
        reservation.bind(("localhost", port + 1))
        assert int(process.free_port()) != port + 1
