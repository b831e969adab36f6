"""Command lines of the tools: a mistake is one line that names the flag."""

import pytest

from harness import certs
from harness.checkpoints import inspection
from harness.command_line import ToolParser
from harness.monitoring import status

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("main", "arguments", "said"),
    [
        (
            status.main,
            ["--traget=localhost:1"],
            "there is no flag --traget; did you mean --target?",
        ),
        (
            status.main,
            ["--target=localhost:1", "--vraiables"],
            "no flag --vraiables; did you mean --variables?",
        ),
        (status.main, ["--xyz"], "there is no flag --xyz (see"),
        (inspection.main, ["--vlaues", "runs"], "did you mean --values?"),
        (certs.main, ["--uot=certs", "--hosts=a"], "did you mean --out?"),
        (certs.main, [], "required: --out, --hosts"),
    ],
)
def test_misspelt_flag_is_named(
    capsys: pytest.CaptureFixture[str], main: object, arguments: list[str], said: str
) -> None:
    """A misspelt flag is named in one line with the nearest flag."""
    assert callable(main)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    told = capsys.readouterr().err
    assert ended.value.code == 2 and said in told and told.count("\n") == 1


def test_two_dashes_end_the_flags() -> None:
    """Words after two dashes are no flags."""
    parser = ToolParser("harness.some", "Some tool.")
    parser.add_argument("words", nargs="*")
    assert parser.parse_args(["--", "--anything"]).words == ["--anything"]
