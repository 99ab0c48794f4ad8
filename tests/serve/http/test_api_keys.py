"""API keys, and the isolation of their prefix caches."""

from __future__ import annotations

import openai
import pytest

from jaxkv import UserError
from jaxkv.serve.http import parse_api_keys
from tests.serve.http.conftest import ENDLESS, bearer, eventually, serving
from tests.serve.http.fake import FakeEngine

FILE = """\
# who        salt
first
second
ours-1       ours
ours-2       ours
imitator     first
shorter      our
"""


@pytest.fixture(scope="module")
def guarded():
    tenants, admins = parse_api_keys(FILE, "keys"), parse_api_keys("root\n", "admins", salts=False)
    with serving(FakeEngine(), tenants=tenants, admins=admins, max_per_key=2) as served:
        yield served


@pytest.mark.parametrize("headers", [
    {}, bearer(""), bearer("third"), bearer("firs"), bearer("first2"), bearer("first second"),
    bearer("FIRST"), bearer("ours"), {"authorization": "first"}, {"authorization": "Basic first"},
    {"authorization": "Bearer \xe9"}, {"x_api_key": "first"},
])  # fmt: skip
def test_an_invalid_key_gives_401(guarded, headers):
    for method, path in [
        ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"),
        ("GET", "/v1/models/bytes"), ("GET", "/metrics"), ("GET", "/version"), ("GET", "/nowhere"),
    ]:  # fmt: skip
        answer = guarded.ask(method, path, b"{" if method == "POST" else None, **headers)
        assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert answer.error["code"] == "invalid_api_key"
        assert "third" not in answer.error["message"]
    assert guarded.ask("GET", "/health", **headers).status == 200


def test_metrics_need_an_admin_key(guarded):
    """They show the prefix hits of every key."""
    assert guarded.ask("GET", "/metrics", **bearer("root")).status == 200
    assert guarded.ask("GET", "/metrics%0A", **bearer("ours-1")).status in (403, 404)
    answer = guarded.ask("GET", "/metrics", **bearer("ours-1"))
    assert answer.status == 403 and "--admin-key-file" in answer.error["message"]
    assert guarded.complete("|x", bearer("root")).status == 401
    with serving(FakeEngine(), tenants=parse_api_keys("first", "keys")) as served:
        assert served.ask("GET", "/metrics", **bearer("first")).status == 403


def cached(served, prompt: str, key: str, salt: str | None = None) -> int:
    answer = served.complete(prompt, bearer(key), cache_salt=salt)
    return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_keys_share_prefixes_only_with_an_equal_salt(guarded):
    prompt = "what only some should know|x"
    assert cached(guarded, prompt, "ours-1") == 0
    assert cached(guarded, prompt, "ours-2") > 0
    assert cached(guarded, prompt, "ours-2", "mine") == 0
    assert cached(guarded, prompt, "ours-1", "mine") > 0
    assert cached(guarded, prompt, "first") == 0
    assert cached(guarded, prompt, "first") > 0


@pytest.mark.parametrize("key, salt, salt_guesses", [
    ("first", None, ["first", "key first", "salt first", "null", '["key first", null]']),
    ("ours-1", None, ["s", "ours", "salt ours", '["salt ours", null]']),
    ("ours-1", "mine", ["smine", "mine", '["salt ours", "mine"]', 'mine"]', "salt ours mine"]),
])  # fmt: skip
def test_another_keys_salt_gives_no_access_to_its_prefixes(guarded, key, salt, salt_guesses):
    """For similar keys and salts, and for each way to name the salt in a request."""
    prompt = f"a secret of {key} {salt}|x"
    assert cached(guarded, prompt, key, salt) == 0
    scope = next(r.salt for r in guarded.engine.requests[::-1])
    for thief in ("second", "imitator", "shorter"):
        assert cached(guarded, prompt, thief) == 0
        for named in {*salt_guesses, scope}:
            assert cached(guarded, prompt, thief, named) == 0


def test_the_limit_of_concurrent_requests_per_key(guarded):
    guarded.engine.pause = 0.01
    running = [guarded.send(ENDLESS, "first") for _ in range(2)]
    eventually(lambda: len(guarded.engine.handles) == 2)
    answer = guarded.complete("|x", bearer("first"))
    assert answer.status == 429 and answer.error["code"] == "rate_limit_exceeded"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert guarded.complete("|x", bearer("second")).status == 200
    for connection in running:
        connection.close()
    guarded.engine.pause = 0
    eventually(lambda: guarded.complete("|x", bearer("first")).status == 200)


@pytest.mark.parametrize("content, words", [
    ("", ["at least one key"]),
    ("a b c\n", ["line 1", "3 words"]),
    ("good\nschlüssel\n", ["line 2", "ASCII"]),
    ("good\nother\ngood salt\n", ["line 3", "duplicate"]),
    ("a b c d", ["line 1", "4 words"]),
    ("a name=caf\xe9", ["line 1", "name= must be"]),
    ("a requests=0", ["line 1", "requests= must be a whole number from 1", "got '0'"]),
    ("a tokens=1e3", ["line 1", "tokens= must be a whole number from 1"]),
    ("a request=3", ["line 1", "name, requests or tokens", "got request="]),
    ("a salt limit=3 name=b", ["line 1", "got limit="]),
    ("a name=b salt tokens=5", ["line 1", "got name="]),
    ("a requests=1 requests=2", ["line 1", "requests= must be given once"]),
    ("first\nsecond name=first", ["a name must not be a key"]),
])  # fmt: skip
def test_invalid_key_files(content, words):
    with pytest.raises(UserError) as caught:
        parse_api_keys(content, "keys.txt")
    message = str(caught.value)
    assert message.startswith("keys.txt") and all(word in message for word in words)
    assert "good" not in message  # a key is never quoted


def test_admin_keys_have_no_salts():
    with pytest.raises(UserError, match="line 1: must be one ASCII key, got 2 words"):
        parse_api_keys("root salt\n", "admins", salts=False)


def test_comments_are_not_salts():
    """A comment that counted as a salt would let several keys share a prefix cache."""
    commented = parse_api_keys("  # all\nfirst #of us\nsecond pepper # and salt\n", "keys")
    assert commented == parse_api_keys("first\nsecond pepper", "keys")


def test_the_limits_count_answers_not_requests():
    tenants = parse_api_keys("key", "keys")
    with serving(FakeEngine(), tenants=tenants, max_per_key=3, max_in_flight=5) as served:
        headers = {"authorization": "Bearer key"}
        assert served.complete("|a", headers, n=3).status == 200
        answer = served.complete("|a", headers, n=4)
        assert (
            answer.status == 400 and "3 answers" in answer.error["message"]
        )  # it can never be accepted
        assert served.complete(["|a"] * 3, headers).status == 200
    with serving(FakeEngine(), max_in_flight=5) as served:
        assert served.complete("|a", n=6).status == 400  # likewise
        assert served.complete("|a", n=5).status == 200


def test_requests_name_their_key_as_owner(guarded):
    for key in ("first", "ours-1", "first"):
        guarded.complete("x", bearer(key), cache_salt="of a request")
    first, other_owner, again = (request.owner for request in guarded.engine.requests[-3:])
    assert first == again != other_owner and "first" not in first


def test_exceptions_of_the_client():
    tenants = parse_api_keys("first\n", "keys")
    with serving(FakeEngine(), tenants=tenants, max_per_key=0) as served:
        with served.client("second") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with served.client("first") as client:
            assert client.models.list().data
            with pytest.raises(openai.RateLimitError):
                client.completions.create(model="bytes", prompt="|x")
