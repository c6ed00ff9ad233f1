"""Events: what a handler of the log keeps of them."""

import logging

import pytest

from penstock.engine.cluster.logs import event


def test_log_record_has_the_text_of_an_exception_without_its_frames(
    caplog: pytest.LogCaptureFixture,
) -> None:
    try:
        raise ValueError("3 of 4 blocks")
    except ValueError as error:
        event("not sent", logging.WARNING, error=error, request=7)
    (record,) = caplog.records
    assert record.fields == {"error": "3 of 4 blocks", "request": 7}  # type: ignore[attr-defined]
