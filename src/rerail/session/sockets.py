"""Finds the TCP connections that a gloo group opened, and cuts them so that nobody waits in it any longer.

gloo's own abort() frees nobody. Shutting down the *established* connections makes every waiting collective raise at
once; its listening sockets must be left alone, touching one ends the process. Called by `session.groups`.
"""

from __future__ import annotations

import os
import socket
import stat


def open_sockets() -> set[tuple[int, int]]:
    """(descriptor, inode) of every socket of this process."""
    found: set[tuple[int, int]] = set()
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            status = os.fstat(fd)
        except OSError:
            continue  # the descriptor of the listing itself, or one closed meanwhile
        if stat.S_ISSOCK(status.st_mode):
            found.add((fd, status.st_ino))
    return found


def listening_ports(sockets: set[tuple[int, int]]) -> set[int]:
    """Ports on which any of these TCP sockets listens."""
    return {port for fd, _ in sockets if (port := _listening_port(fd))}


def connections(sockets: set[tuple[int, int]], ports: set[int]) -> set[tuple[int, int]]:
    """Those of the sockets that are TCP connections from or to one of the ports: the group's own, nobody else's."""
    return {(fd, inode) for fd, inode in sockets if _touches(fd, ports)}


def established(sockets: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those of the sockets that are TCP and do not listen."""
    return {(fd, inode) for fd, inode in sockets if _is_tcp(fd) and not _listening_port(fd)}


def still_open(sockets: set[tuple[int, int]]) -> bool:
    """Whether their owner has not closed all of them yet."""
    for fd, inode in sockets:
        try:
            if os.fstat(fd).st_ino == inode:
                return True
        except OSError:
            continue
    return False


def cut(sockets: set[tuple[int, int]]) -> int:
    """Shut these connections down in both directions; how many were still there."""
    done = 0
    for fd, inode in sockets:
        try:
            if os.fstat(fd).st_ino != inode:
                continue  # closed meanwhile, and the number given to something else
            with _borrowed(fd) as sock:
                sock.sock.shutdown(socket.SHUT_RDWR)
            done += 1
        except OSError:
            continue
    return done


class _borrowed:
    """A socket object over a descriptor that belongs to someone else: never closes it."""

    def __init__(self, fd: int) -> None:
        self.sock = socket.socket(fileno=os.dup(fd))

    def __enter__(self) -> _borrowed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()


def _listening_port(fd: int) -> int:
    try:
        with _borrowed(fd) as borrowed:
            sock = borrowed.sock
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                return 0
            if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return 0
            return int(sock.getsockname()[1])
    except OSError:
        return 0


def _touches(fd: int, ports: set[int]) -> bool:
    try:
        with _borrowed(fd) as borrowed:
            sock = borrowed.sock
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            return sock.getsockname()[1] in ports or sock.getpeername()[1] in ports
    except OSError:
        return False


def _is_tcp(fd: int) -> bool:
    try:
        with _borrowed(fd) as borrowed:
            return borrowed.sock.family in (socket.AF_INET, socket.AF_INET6)
    except OSError:
        return False
