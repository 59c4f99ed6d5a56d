"""Keys of prefixes: equal for equal beginnings, and for nothing else that anybody can find."""

import random

import pytest

from sluice.cache.keys import chained_keys, root_key, secret_salt

UNIT = 4


def keys(tokens, *root):
    return chained_keys(root_key(*root), tokens, UNIT).units


def test_a_key_stands_for_all_tokens_before_it():
    rng = random.Random(seed := random.randrange(10**6))
    print(f"seed {seed}")
    tokens = [rng.randrange(130_000) for _ in range(10 * UNIT + 3)]
    assert len(keys(tokens)) == len(set(keys(tokens))) == 10
    for at in rng.sample(range(10 * UNIT), 12):
        changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
        same = [a == b for a, b in zip(keys(tokens), keys(changed), strict=True)]
        assert same == [unit < at // UNIT for unit in range(10)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("model", "a"), ("model", "b")),
        (("model", ""), ("model", "\0")),
        (("model\0a", "b"), ("model", "a\0b")),
        (("model", "a"), ("modela", "")),
        (("model", "\ud800"), ("model", "?")),
    ],
)
def test_what_rows_depend_on_never_runs_together(one, other):
    assert not set(keys(range(40), *one)) & set(keys(range(40), *other))


def test_without_the_secret_nobody_computes_a_key():
    mine, guessed = (secret_salt(secret, "tenant") for secret in ("s" * 16, "t" * 16))
    assert mine == secret_salt("s" * 16, "tenant")
    assert mine != guessed and "tenant" not in mine
    assert secret_salt("a", "bc") != secret_salt("ab", "c")
