"""What a misspelled command line is answered with."""

import pytest

from penstock import cli


@pytest.mark.parametrize(
    ("words", "command", "said"),
    [
        (["serv"], "penstock", "did you mean serve?"),
        (["serve", "--prot", "80"], "penstock serve", "unrecognized arguments: --prot: did you mean --port?"),
        (["serve", "--prot=80"], "penstock serve", "did you mean --port?"),
        (["serve", "--prot", "--hots"], "penstock serve", "did you mean --port, --host?"),
        (["serve", "--zzz"], "penstock serve", "unrecognized arguments: --zzz\n"),
        (["serve", "model", "other"], "penstock serve", "unrecognized arguments: other\n"),
        (["serve", "--log-format", "jsn"], "penstock serve", "did you mean json?"),
        (["bench", "srve"], "penstock bench", "did you mean serve?"),
        (["bench", "serve", "--confg", "x"], "penstock bench serve", "unrecognized arguments: --confg x"),
        (["--versoin", "serve"], "penstock", "did you mean --version?"),
        (["zzz"], "penstock", "invalid choice: 'zzz'"),
    ],
)
def test_a_misspelled_word_is_answered_with_the_nearest_and_the_usage_of_its_command(
    words: list[str], command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    usage, _, error = capsys.readouterr().err.partition(f"\n{command}: error: ")
    assert usage.startswith(f"usage: {command} [") and said in error
