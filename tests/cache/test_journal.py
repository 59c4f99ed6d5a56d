"""Whoever follows the journal's reports knows the same keys, whenever it asks."""

import random

from sluice.cache.journal import Journal


def followed(known, report):
    return set(report.added) if report.since == 0 else known - set(report.removed) | {*report.added}


def test_a_follower_that_asks_now_and_then_knows_every_key():
    seed = random.randrange(2**32)
    print(f"seed={seed}")
    rng, journal, kept, known, version = random.Random(seed), Journal(20), set(), set(), 0
    for _ in range(2000):
        key = bytes([rng.randrange(30)])
        (journal.remove if key in kept else journal.add)(key)
        kept ^= {key}
        if rng.random() < 0.1:
            report = journal.since(version)
            known, version = followed(known, report), report.version
            assert known == kept


def test_a_follower_that_missed_changes_or_met_another_journal_gets_everything():
    journal = Journal(max_changes=2)
    for key in (b"a", b"b", b"c"):
        journal.add(key)
    for version in (0, 99):
        report = journal.since(version)
        assert report.since == 0 and set(report.added) == {b"a", b"b", b"c"}
    assert journal.since(1).since == 1 and set(journal.since(1).added) == {b"b", b"c"}
