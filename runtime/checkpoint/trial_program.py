"""The program of a trial: reads arrays that somebody else may have written, in a process that nobody needs.

Run by path (`runtime.checkpoint.trial`), so that it imports nothing but tensorstore. What it finds wrong with arrays it
passes over: whoever reads them tells. What counts is that it ends by itself.
"""

import importlib.util
import json
import resource
import sys
from pathlib import Path
from typing import Any

_SANDBOX = Path(__file__).parents[1] / "sandbox.py"


def main() -> None:
    """Opens the arrays that standard input names, and reads those that are to be read.

    The one line that it says is what `runtime.sandbox.confine` gives.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    request: dict[str, Any] = json.load(sys.stdin)
    import tensorstore as ts

    context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": 0}, "file_io_concurrency": {"limit": 1}})
    print(confine(), flush=True)
    for spec in request["arrays"]:
        try:
            store = ts.open(spec, open=True, read=True, context=context).result()
            if request["values"]:
                store.read().result()
        except ValueError:
            continue


def confine() -> str:
    """Takes from this process what it does not need to read files, as `runtime.sandbox.confine`; imports no runtime."""
    about = importlib.util.spec_from_file_location("sandbox", _SANDBOX)
    assert about is not None and about.loader is not None
    sandbox = importlib.util.module_from_spec(about)
    about.loader.exec_module(sandbox)
    problem: str = sandbox.confine(reads_files=True)
    return problem


if __name__ == "__main__":
    main()
