"""Limits of requests and tokens a minute."""

from __future__ import annotations

import pytest

from jaxkv.serve.http import parse_api_keys
from jaxkv.serve.http.access import Tenant
from jaxkv.serve.http.errors import APIError
from jaxkv.serve.http.rates import RateLimits
from tests.serve.http.conftest import bearer, eventually, serving
from tests.serve.http.fake import FakeEngine

KEYS = "slow requests=2\nshort name=brief tokens=20\nboth ours name=two requests=9 tokens=9\nfree"


def test_the_options_of_a_key_come_in_any_order():
    slow, short, both, free = parse_api_keys(KEYS, "keys")
    assert (slow.limits, slow.name) == ({"requests": 2}, "unnamed")
    assert (short.limits, short.name) == ({"tokens": 20}, "brief")
    assert both.limits == {"requests": 9, "tokens": 9}
    assert (both.scope, both.name) == ("salt ours", "two")
    assert free.limits == {}


def test_a_limit_fills_evenly():
    """Against the sum of what was used and what came, at any times."""
    now = 0.0
    rates, tenant = RateLimits(lambda: now), Tenant(b"a", limits={"requests": 6, "tokens": 60})
    used, accepted = 0, 0
    for step in range(400):
        now += (step % 7) / 3
        try:
            rates.check(tenant)
        except APIError as refusal:
            assert refusal.status == 429
            assert 1 <= int(refusal.headers["retry-after"]) <= 60
            continue
        accepted += 1
        rates.use(tenant, requests=1, tokens=step % 30)
        used += step % 30
        assert accepted <= 6 + now * 6 / 60
        assert used <= 60 + now * 60 / 60 + 30
    assert accepted > 0.5 * min(6 + now / 10, 60 + now)


def test_requests_beyond_a_limit_get_429():
    with serving(FakeEngine(), tenants=parse_api_keys(KEYS, "keys")) as served:
        assert [served.complete("|a", bearer("slow")).status for _ in range(3)] == [200, 200, 429]
        answer = served.complete("|a", bearer("slow"))
        assert answer.error["code"] == "rate_limit_exceeded"
        assert "2 requests a minute" in answer.error["message"]
        assert 25 <= int(answer.headers["retry-after"]) <= 30
        tokens = {"model": "bytes", "prompt": "a"}  # which no limit a minute counts
        for path in ("/tokenize", "/v1/completions/render"):
            assert served.ask("POST", path, tokens, **bearer("slow")).status == 200
        assert served.complete("|a", bearer("free")).status == 200
        # Prompt and answer count, and a request may go beyond what is left.
        assert served.complete("x" * 10 + "|abcdefgh", bearer("short")).status == 200
        eventually(lambda: served.complete("|", bearer("short")).status == 429)
        assert "20 tokens a minute" in served.complete("|", bearer("short")).error["message"]


def test_a_refused_request_does_not_count():
    with serving(FakeEngine(), tenants=parse_api_keys(KEYS, "keys")) as served:
        for _ in range(5):
            assert served.complete("|a", bearer("slow"), temperature=-1).status == 400
        assert served.complete("|a", bearer("slow")).status == 200


@pytest.mark.parametrize("changed", [{"requests": 3}, {}])
def test_a_limit_that_changes_begins_again(changed):
    rates = RateLimits(lambda: 0.0)
    rates.use(Tenant(b"a", limits={"requests": 1}), requests=1)
    with pytest.raises(APIError):
        rates.check(Tenant(b"a", limits={"requests": 1}))
    rates.check(Tenant(b"a", limits=changed))
