"""The program of a trial: reads arrays that somebody else may have written, in a process that nobody needs.

Run by path (`runtime.checkpoint.trial`), so that it imports nothing but tensorstore. What it finds wrong with arrays it
passes over: whoever reads them tells. What counts is that it ends by itself.
"""

import json
import resource
import sys
from typing import Any


def main() -> None:
    """Opens the arrays that standard input names, and reads those that are to be read."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    request: dict[str, Any] = json.load(sys.stdin)
    import tensorstore as ts

    context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": 0}, "file_io_concurrency": {"limit": 1}})
    for spec in request["arrays"]:
        try:
            store = ts.open(spec, open=True, read=True, context=context).result()
            if request["values"]:
                store.read().result()
        except ValueError:
            continue


if __name__ == "__main__":
    main()
