"""Events: what a handler of the log keeps of them."""

import json
import logging

import pytest

from penstock.engine.cluster.logs import JsonFormatter, TextFormatter, event


def test_log_record_has_the_text_of_an_exception_without_its_frames(
    caplog: pytest.LogCaptureFixture,
) -> None:
    try:
        raise ValueError("3 of 4 blocks")
    except ValueError as error:
        event("not sent", logging.WARNING, error=error, request=7)
    (record,) = caplog.records
    assert record.fields == {"error": "3 of 4 blocks", "request": 7}  # type: ignore[attr-defined]


@pytest.mark.parametrize("formatter", [TextFormatter, JsonFormatter])
@pytest.mark.parametrize("text", ['\x1b[2J\nlevel=error event="the disk is full" \x07', "\u2028\x9b31m=\r" * 500])
def test_text_of_a_stranger_stays_quoted_in_one_line(
    text: str, formatter: type[TextFormatter | JsonFormatter], caplog: pytest.LogCaptureFixture
) -> None:
    event("links refused", logging.WARNING, last=text)
    line = formatter("bridge").format(caplog.records[0])
    assert line.isprintable() and json.dumps(text) in line
