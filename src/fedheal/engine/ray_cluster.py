"""Connect to a Ray cluster, for one run on several machines (`ray_actors`) or for many runs (`campaign.ray`)."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from fedheal.core.errors import explain_install


@contextmanager
def connect_to_cluster(address: str) -> Iterator[Any]:
    """Yield the module `ray`, connected to the cluster at this address. A process that is connected already stays so.

    Raises:
        ValueError: Ray is not installed, no cluster answers, or its versions of Ray or Python are not those of this process.
    """
    ray = import_ray()
    connect = not ray.is_initialized()
    if connect:
        check_reachable(address)
        try:
            ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ValueError, ray.exceptions.RayError) as error:
            raise ValueError(f"no Ray cluster answers at {address!r}: {error}") from None
        except RuntimeError as error:
            if "mismatch" not in str(error):
                raise
            reason = " ".join(str(error).split())
            raise ValueError(
                f"the Ray cluster at {address!r} does not fit this process ({reason}): install the same versions of Ray and "
                "Python on all machines"
            ) from None
    with _silence_ray() if connect else nullcontext():
        try:
            yield ray
        finally:
            if connect:
                ray.shutdown()  # prints what Ray has held back


@contextmanager
def _silence_ray() -> Iterator[None]:
    """Keep what Ray says about lost workers out of the standard output, which may hold JSON; the engine logs losses itself.

    No public option does that.
    """
    from ray._private import worker

    before = getattr(worker, "_worker_logs_enabled", True)
    worker._worker_logs_enabled = False
    try:
        yield
    finally:
        worker._worker_logs_enabled = before


def import_ray() -> Any:
    """Return the module `ray`. Raise ValueError if it is not installed."""
    try:
        import ray
    except ImportError:
        raise ValueError(f"Ray is not installed: {explain_install('ray')}") from None
    return ray


def check_reachable(address: str) -> None:
    """Raise ValueError if nothing listens at HOST:PORT. Ray itself would wait for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return  # 'auto', 'local' or a URL: left to Ray
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ValueError(
            f"no Ray cluster answers at {address!r} ({error.strerror or error}): start one, or use --ray local"
        ) from None
