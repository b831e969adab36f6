"""Runs the code cells of a notebook in one namespace, as a kernel would: ``python run_notebook.py file.ipynb``."""

import ast
import json
import pathlib
import sys
import traceback


def main(path: str) -> int:
    """Runs the cells in order and shows the last value of each; 1 when a cell fails, and which."""
    cells = [
        c for c in json.loads(pathlib.Path(path).read_text())["cells"] if c["cell_type"] == "code"
    ]
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells, 1):
        source = "".join(cell["source"])
        tree = ast.parse(source)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        try:
            exec(compile(tree, f"cell {number}", "exec"), namespace)
            if isinstance(last, ast.Expr):
                value = eval(
                    compile(ast.Expression(last.value), f"cell {number}", "eval"), namespace
                )
                if value is not None:
                    print(repr(value))
        except Exception:
            print(f"cell {number} failed:\n{source}")
            traceback.print_exc()
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
