"""The page in a headless Chromium: asks for the key, shows what there is, escapes it, and outlives its server."""

import contextlib
import http.client
import re
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("httptools")

from tests.support.browser import Browser
from tests.support.command import serving

KEY = "sesame & <more>"
NAME = "<img src=x onerror=\"document.title='run'\"><b id=bold>x</b>"
NUMBER = "[...document.querySelectorAll('.tile')].find(one => one.innerText.includes('{}')).firstChild.innerText"
OPEN = NUMBER.format("requests open")
SERVER = (
    *("--device-model", "simulated", "--api-key", KEY, "--served-model-name", NAME),
    *("--shutdown-timeout", "0.1", "--max-model-len", "20000"),
)


@contextlib.contextmanager
def streaming(port: int, many: int) -> Iterator[None]:
    """Requests that are open meanwhile, and being answered."""
    body = b'{"prompt": "hello", "max_tokens": 15000, "stream": true}'
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/completions"
    with contextlib.ExitStack() as open_ones:
        answers = [
            open_ones.enter_context(urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60))
            for _ in range(many)
        ]
        is_over = threading.Event()
        readers = [threading.Thread(target=read_on, args=(answer, is_over)) for answer in answers]
        for reader in readers:
            reader.start()
        try:
            yield
        finally:
            is_over.set()
            for reader in readers:
                reader.join()


def read_on(answer: http.client.HTTPResponse, is_over: threading.Event) -> None:
    while not is_over.is_set() and answer.read1(4096):
        pass


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    if Browser.find() is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    with Browser(tmp_path / "profile") as page:
        with serving(*SERVER) as (_, port):
            page.size(390, 800)
            page.go(f"http://127.0.0.1:{port}/dashboard")
            the_key_is_asked_for_and_a_wrong_one_is_told(page)
            with streaming(port, 3):
                what_is_shown_is_what_is_asked(page)
                a_phone_need_not_scroll_sideways_and_the_dark_is_dark(page)
            page.until(f"{OPEN} === '0'")
            names_are_text(page)
            the_key_is_in_no_address(page)
            assert page.complaints == ["Failed to load resource: the server responded with a status of 401 "
                                       "(Unauthorized)"] * len(page.complaints)  # fmt: skip
        page.until("document.getElementById('state').innerText === 'gone'")
        with serving(*SERVER, "--port", str(port)):
            page.until("document.getElementById('state').innerText === 'serves'")


def the_key_is_asked_for_and_a_wrong_one_is_told(page: Browser) -> None:
    page.until("document.getElementById('key')?.offsetParent !== null && document.readyState === 'complete'")
    page.until("!document.getElementById('ask').hidden")
    assert page.evaluate("document.getElementById('seen').hidden")
    for key in ("no", KEY):
        page.evaluate(f"document.getElementById('key').value = {key!r}")
        page.evaluate("document.querySelector('#form button').click()")
        if key != KEY:
            page.until("document.getElementById('state').innerText.includes('does not open')")
    page.until("!document.getElementById('seen').hidden && document.getElementById('ask').hidden")


def what_is_shown_is_what_is_asked(page: Browser) -> None:
    page.until(f"{OPEN} === '3'")
    page.until(f"{NUMBER.format('running')} === '3'")
    page.until(f"parseFloat({NUMBER.format('tokens generated/s')}.replace(',', '')) > 0")
    page.until("document.querySelectorAll('#charts svg path').length === 7")
    page.until("document.querySelector('#charts path').getAttribute('d').includes('L')")  # two points at least
    rows = page.evaluate("[...document.querySelectorAll('#processes tbody tr')].map(one => one.innerText)")
    roles = ["launcher", "core 0.0", "worker 0.0", "output 0.0", "server 0"]
    assert [row.split("\t")[0] for row in rows] == ["shared", *roles]
    assert all("serves" in row for row in rows[1:]), rows
    channels = page.evaluate("document.getElementById('channels').innerText")
    assert "steps 0\tbroadcast" in channels and "deltas 0\tinbox" in channels
    assert page.evaluate(NUMBER.format("restarts")) == "0"
    assert page.evaluate(NUMBER.format("prefix hits")).endswith("%")
    assert page.evaluate("document.getElementById('with-items').hidden")
    assert page.evaluate("document.querySelector('footer a').getAttribute('href')") == "/dashboard/grafana.json"


def a_phone_need_not_scroll_sideways_and_the_dark_is_dark(page: Browser) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    grounds = []
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    light, dark = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in grounds)
    assert light > 600 and dark < 150, grounds


def names_are_text(page: Browser) -> None:
    assert page.evaluate("document.getElementById('name').innerText") == NAME
    assert page.evaluate("document.querySelectorAll('img, #bold').length") == 0
    assert page.evaluate("document.title") == f"{NAME} – penstock"


def the_key_is_in_no_address(page: Browser) -> None:
    addresses = page.evaluate("performance.getEntries().map(one => one.name).concat(location.href)")
    assert len(addresses) > 3 and not any("sesame" in address or "?" in address for address in addresses), addresses
    assert "sesame" not in page.evaluate("document.documentElement.outerHTML")
