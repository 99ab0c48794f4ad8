"""Prompts and what is done with them in most tests."""

from __future__ import annotations

from jaxkv.prefix import root

ROOT = root(policy="full")
P = list(range(100, 114))  # in blocks of 4: three full ones and a tail of 2


def admit(pool, tokens, root=ROOT, computed=None, **how):
    """A lease on a prompt whose tokens are computed at once, or so many of them."""
    lease = pool.admit(pool.read(tokens, root), **how)
    pool.publish(lease, computed)
    return lease


def serve(pool, tokens, root=ROOT, new=()):
    """A request from beginning to end; tokens that need not be computed."""
    lease = admit(pool, tokens, root)
    for token in new:
        pool.append(lease, token)
        pool.publish(lease)
    pool.release(lease)
    return lease.cached


def match(pool, tokens, root=ROOT):
    return pool.match(pool.read(tokens, root))


def refs(lease):
    return [block.refs for block in lease.blocks]


def cached(pool):
    """Pages in the order in which they will be evicted."""
    return [block.page for block in pool._pages.cached]
