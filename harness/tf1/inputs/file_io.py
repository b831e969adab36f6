"""``tensorflow.python.lib.io.file_io``: ``tf.gfile`` by its lower-case names."""

from __future__ import annotations

from typing import Any

from harness.tf1.inputs import gfile
from harness.tf1.names.missing import namespace
from harness.tf1.names.table import add_names


def read_file_to_string(filename: str, binary_mode: bool = False) -> Any:
    """Returns the text of a file, or its bytes. Raises NotFoundError when there is none."""
    with gfile.GFile(filename, "rb" if binary_mode else "r") as file:
        return file.read()


def write_string_to_file(filename: str, file_content: str | bytes) -> None:
    """Writes a file anew."""
    with gfile.GFile(filename, "wb" if isinstance(file_content, bytes) else "w") as file:
        file.write(file_content)


add_names(
    "tf.python.lib.io.file_io",
    {
        "FileIO": gfile.GFile,
        "copy": gfile.Copy,
        "create_dir": gfile.MkDir,
        "delete_file": gfile.Remove,
        "delete_recursively": gfile.DeleteRecursively,
        "file_exists": gfile.Exists,
        "get_matching_files": gfile.Glob,
        "is_directory": gfile.IsDirectory,
        "list_directory": gfile.ListDirectory,
        "read_file_to_string": read_file_to_string,
        "recursive_create_dir": gfile.MakeDirs,
        "rename": gfile.Rename,
        "stat": gfile.Stat,
        "walk": gfile.Walk,
        "write_string_to_file": write_string_to_file,
    },
)

__getattr__, __dir__ = namespace("tf.python.lib.io.file_io")
