"""What the scripts of clients share: a tool, types of answers, and a loop over cases.

Runs in the clients' environment, with the server's address in OPENAI_BASE_URL. The model is random: numbers and strings
have limits, so that each answer ends.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, Field

MODEL = os.environ["PENSTOCK_CLIENT_MODEL"]
URL = os.environ["OPENAI_BASE_URL"]
# Biases of the end id, of a quotation mark and of a brace: an answer ends as soon as its grammar allows.
TO_THE_END = {"2": 40, "9": 20, "100": 30}
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather in Rio?"}]


class Forecast(BaseModel, extra="forbid"):
    """Weather of a city."""

    city: Literal["Rio", "Bern"]
    days: int = Field(ge=1, le=14)


def weather(city: Literal["Rio", "Bern"], days: Literal[1, 2, 3]) -> str:
    """Weather of a city.

    Args:
        city: the city
        days: how many days
    """
    return f"sunny in {city} for {days} days"


def run(*cases: Callable[[], Any]) -> None:
    """Runs the cases, and exits with 1 if any fails."""
    failed = 0
    for case in cases:
        try:
            case()
            print(f"ok {case.__name__}", flush=True)
        except Exception as error:
            failed += 1
            traceback.print_exc()
            print(f"FAILED {case.__name__}: {type(error).__name__}: {str(error)[:500]}", flush=True)
    sys.exit(failed > 0)
