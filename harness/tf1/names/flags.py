"""``tf.app.flags``: absl flags with TensorFlow's argument names, parsed when first read at the latest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags as absl_flags

from harness.tf1.names.missing import namespace as _namespace

# flags defined by the functions below are those of the program that calls them
absl_flags.disclaim_key_flags()


def parse(argv: list[str]) -> list[str]:
    """Parses a command line, the program's name first; gives back what are no flags of anybody's.

    The beginning of a flag's name will do where no other flag of the program begins so, as before
    TensorFlow 1.5.
    """
    return list(absl_flags.FLAGS([*argv[:1], *map(_in_full, argv[1:])], known_only=True))


def _in_full(argument: str) -> str:
    known = absl_flags.FLAGS
    name, equals, value = argument.removeprefix("--").partition("=")
    if not name or name in known or not argument.startswith("--"):
        return argument
    # absl's own flags do not count: TensorFlow 1.0 knew none of them.
    longer = [each for each in known if each.startswith(name) and not _is_absls(each)]
    return f"--{longer[0]}{equals}{value}" if len(longer) == 1 else argument


def _is_absls(flag_name: str) -> bool:
    return str(absl_flags.FLAGS.find_module_defining_flag(flag_name)).startswith("absl.")


class FlagValues:
    """The flags of the program.

    The first read parses the command line; undefined flags are left alone.
    """

    def __getattr__(self, name: str) -> Any:
        # Programs listed their flags by this attribute before there was another way.
        if name == "__flags":
            self._parse_flags()
            return absl_flags.FLAGS.flag_values_dict()
        if name.startswith("__"):
            raise AttributeError(name)
        values = absl_flags.FLAGS
        # Programs read flags before tf.app.run, as TensorFlow 1 allowed.
        if not values.is_parsed():
            parse(sys.argv)
        return getattr(values, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(absl_flags.FLAGS, name, value)

    def __getitem__(self, name: str) -> Any:
        return absl_flags.FLAGS[name]

    def __iter__(self) -> Iterator[str]:
        self._parse_flags()
        return iter(absl_flags.FLAGS)

    def __contains__(self, name: str) -> bool:
        return name in absl_flags.FLAGS

    def _parse_flags(self, args: list[str] | None = None) -> None:
        """Parses the command line now, as programs asked for before TensorFlow 1.5."""
        if not absl_flags.FLAGS.is_parsed() or args is not None:
            parse([sys.argv[0], *(sys.argv[1:] if args is None else args)])

    def __call__(self, argv: list[str], known_only: bool = True) -> list[str]:
        """Parses ``argv``; gives back what are no flags."""
        return parse(argv) if known_only else list(absl_flags.FLAGS(argv))


FLAGS = FlagValues()
"""The flags of the program."""


def _free(flag_name: str) -> None:
    """Makes room for a flag of the program that absl defines too: ``log_dir``, most of all.

    TensorFlow 1.0 knew nothing of absl, so any name was the program's. absl's logging works on, and
    finds the program's flag.
    """
    if flag_name in absl_flags.FLAGS and _is_absls(flag_name):
        delattr(absl_flags.FLAGS, flag_name)


def _make_definer(shown: str, kind: str, define: Callable[..., Any]) -> Callable[..., Any]:
    def define_flag(
        flag_name: str, default_value: Any = None, docstring: str = "", **options: Any
    ) -> Any:
        _free(flag_name)
        return define(flag_name, default_value, docstring, **options)

    define_flag.__name__ = define_flag.__qualname__ = shown
    define_flag.__doc__ = f"Defines a flag that is {kind}; ``absl.flags.{shown}``."
    return define_flag


class _IntegerParser(absl_flags.IntegerParser):
    """A parser that takes ``np.inf`` too, the default of programs for a number without a limit."""

    def parse(self, argument: Any) -> Any:
        return argument if argument == float("inf") else super().parse(argument)


def _define_integer(name: str, default: Any, help: str, **options: Any) -> Any:
    serializer = absl_flags.ArgumentSerializer[Any]()
    parser = _IntegerParser()
    return absl_flags.DEFINE(parser, name, default, help, serializer=serializer, **options)


DEFINE_string = _make_definer("DEFINE_string", "a string", absl_flags.DEFINE_string)
DEFINE_integer = _make_definer("DEFINE_integer", "a whole number", _define_integer)
DEFINE_float = _make_definer("DEFINE_float", "a number", absl_flags.DEFINE_float)
DEFINE_boolean = _make_definer("DEFINE_boolean", "true or false", absl_flags.DEFINE_boolean)
DEFINE_bool = _make_definer("DEFINE_bool", "true or false", absl_flags.DEFINE_boolean)
DEFINE_list = _make_definer("DEFINE_list", "a list, separated by commas", absl_flags.DEFINE_list)


def DEFINE_enum(
    flag_name: str, default_value: Any, enum_values: list[str], docstring: str = ""
) -> Any:
    """Defines a flag that is one of ``enum_values``; ``absl.flags.DEFINE_enum``."""
    _free(flag_name)
    return absl_flags.DEFINE_enum(flag_name, default_value, enum_values, docstring)


def mark_flag_as_required(flag_name: str) -> None:
    """Makes the program stop with a message when the flag is not given."""
    absl_flags.mark_flag_as_required(flag_name)  # type: ignore[no-untyped-call]


__getattr__, _ = _namespace("tf.flags")
