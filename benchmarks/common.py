"""What the benchmark programs share: where the checkout is, the peers' environment."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
"""Python with the systems that ours is compared with; made by `make bench-setup`."""
