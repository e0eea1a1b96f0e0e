"""Escapes by the network: every family of sockets."""

import os
import socket

from tidemill.sandbox.escapes.escape_tools import call


def tcp(stage):
    """Connect to a port of this machine."""
    socket.create_connection(("127.0.0.1", stage["tcp"]), timeout=2).close()
    return True


def tcp_by_6(stage):
    """Connect by IPv6."""
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as end:
        end.settimeout(2)
        end.connect(("::1", stage["tcp6"]))
        return True


def udp(stage):
    """Send a datagram."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.connect(("127.0.0.1", stage["udp"]))
        end.send(b"escape")
        return end.recv(64) == b"heard"


def listener(stage):
    """Listen on a port that others can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as end:
        end.bind(("127.0.0.1", 0))
        end.listen()
        return True


def raw(stage):
    """Write raw packets."""
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()
    return True


def ping(stage):
    """Send an echo request without root."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP) as end:
        return end.sendto(b"\x08\0\xf7\xff\0\0\0\0", ("127.0.0.1", 0))


def packets(stage):
    """Read every packet of the machine."""
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)).close()
    return True


def netlink(stage):
    """Configure the network."""
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()
    return True


def virtual_machine(stage):
    """Reach the host of a virtual machine."""
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()
    return True


def kernel_crypto(stage):
    """Use the kernel's ciphers, which had faults."""
    return call(41, 198, 38, 5, 0) >= 0


def abstract_name(stage):
    """Connect to a UNIX socket that has a name in memory."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.connect("\0" + stage["abstract"])
        return True


def path_name(stage):
    """Connect to a UNIX socket that is a file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.connect(stage["unix"])
        return True


def pair_of_another_family(stage):
    """Get sockets of another family as a pair."""
    return call(53, 199, 30, 1, 0, bytes(8)) >= 0  # AF_TIPC


def interfaces(stage):
    """See the machine's network interfaces and connections."""
    with open("/proc/net/tcp") as file:
        return os.listdir("/sys/class/net") and file.read().count("\n") > 1
