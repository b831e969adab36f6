"""Shows what the tasks of a cluster do: ``python -m harness.status --help``."""

import sys

from harness.monitoring.status import main

if __name__ == "__main__":
    sys.exit(main())
