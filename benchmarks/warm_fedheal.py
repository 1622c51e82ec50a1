"""fedheal imported and its kernels compiled: forks of a process that has imported this start in milliseconds.

multiprocessing's fork server imports this too. By itself it would end when a client is killed right after it has connected.
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
    """Receive file descriptors. Raise the error that the fork server ignores if the client is gone, not EOFError."""
    try:
        return recvfds(connection, size)
    except EOFError as error:
        raise ConnectionAbortedError(errno.ECONNABORTED, "the client is gone") from error


recvfds = reduction.recvfds
reduction.recvfds = receive_descriptors
