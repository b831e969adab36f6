"""Shows what is in a checkpoint: ``python -m harness.inspect_checkpoint --help``."""

import sys

from harness.checkpoints.inspection import main

if __name__ == "__main__":
    sys.exit(main())
