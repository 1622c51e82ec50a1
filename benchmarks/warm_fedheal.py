"""Not a benchmark: import fedheal and compile its kernels, so that forks of a process that imports this start quickly.

multiprocessing's fork server imports this module, too. Without the change below it would end if a client is killed right after
it has connected.
"""

from __future__ import annotations

import errno
from multiprocessing import reduction
from socket import socket

import torch

import fedheal
import fedheal.campaign.pool
import fedheal.cli.app
import fedheal.cli.display
import fedheal.engine.workers
import fedheal.report.html_page
from tiny_data import quick

torch.set_num_threads(1)  # threads do not survive a fork
for method in ("fedavg", "fedheal"):
    fedheal.run(quick(rounds=1, method=method), progress=False)


def receive_descriptors(connection: socket, size: int) -> list[int]:
    """Receive file descriptors. If the client is gone, raise an error that the fork server ignores instead of EOFError."""
    try:
        return recvfds(connection, size)
    except EOFError as error:
        raise ConnectionAbortedError(errno.ECONNABORTED, "the client is gone") from error


recvfds = reduction.recvfds
reduction.recvfds = receive_descriptors
