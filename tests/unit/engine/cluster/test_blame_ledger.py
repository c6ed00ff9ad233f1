"""The blame ledger: entries of all servers, with an expiry, in a bounded table."""

import numpy as np

from penstock.engine.cluster import blame_ledger
from penstock.engine.cluster.blame_ledger import QUARANTINE_ENTRIES, BlameLedger, ledger_key


def ledgers(servers: int = 2) -> list[BlameLedger]:
    segment = BlameLedger.create(servers)
    return [BlameLedger(segment, servers, server) for server in range(servers)]


def test_entry_of_one_server_is_found_by_all_until_it_expires() -> None:
    first, second = ledgers()
    key, expired = ledger_key(b"a"), ledger_key(b"b")
    assert first.quarantine.is_empty and second.quarantine.is_empty
    first.quarantine.add(expired, -1.0)
    assert second.quarantine.is_empty and second.quarantine.seconds_left(expired) == []
    first.quarantine.add(key, 60.0)
    (left,) = second.quarantine.seconds_left(key)
    assert 0 < left <= 60 and not second.quarantine.is_empty
    assert second.trials.seconds_left(key) == [], "the tables are apart"


def test_entries_of_one_key_are_counted_over_all_servers() -> None:
    first, second = ledgers()
    key = ledger_key(b"account")
    for ledger in (first, second, first):
        ledger.trials.add(key, 60.0)
    assert len(second.trials.seconds_left(key)) == 3


def test_full_table_loses_the_entry_that_expires_first() -> None:
    first, second = ledgers()
    second.quarantine.add(ledger_key(b"of another server"), 1.0)
    keys = [ledger_key(b"%d" % number) for number in range(QUARANTINE_ENTRIES + 1)]
    for number, key in enumerate(keys):
        first.quarantine.add(key, 60.0 + number)
    assert first.quarantine.seconds_left(keys[0]) == []
    assert all(first.quarantine.seconds_left(key) for key in keys[1:])
    assert first.quarantine.seconds_left(ledger_key(b"of another server"))


def test_half_written_entry_is_ignored() -> None:
    segment = BlameLedger.create(1)
    ledger, key = BlameLedger(segment, 1, 0), ledger_key(b"a")
    ledger.quarantine.add(key, 60.0)
    words = np.frombuffer(segment.view(writable=True), np.uint64)
    words[int(np.flatnonzero(words)[2])] += np.uint64(1)
    assert ledger.quarantine.seconds_left(key) == []


def test_key_depends_on_the_bounds_of_its_parts() -> None:
    assert ledger_key(b"ab", b"c") != ledger_key(b"a", b"bc") != ledger_key(b"abc")
    assert len(ledger_key()) == blame_ledger.KEY_NBYTES
