"""What the benchmark programs share: where the checkout is, the peers' environment, free ports."""

import socket
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
"""Python with the systems that ours is compared with; made by `make bench-setup`."""


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()
