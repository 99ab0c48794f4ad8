"""A prompt, and helpers for tests of the prefix index."""

from __future__ import annotations

from jaxkv.serve.prefix import root_hash

ROOT = root_hash(policy="full")
P = list(range(100, 114))  # three full blocks of 4 and a tail of 2


def admit(pool, tokens, root=ROOT, computed=None, **options):
    """Admit a prompt and publish its first `computed` tokens, by default all."""
    lease = pool.admit(pool.hash_prompt(tokens, root), **options)
    pool.publish(lease, computed)
    return lease


def serve(pool, tokens, root=ROOT, new=()):
    """Serve a whole request; returns the number of its tokens that were cached."""
    lease = admit(pool, tokens, root)
    for token in new:
        pool.append(lease, token)
        pool.publish(lease)
    pool.release(lease)
    return lease.cached


def match(pool, tokens, root=ROOT):
    return pool.match(pool.hash_prompt(tokens, root))


def refs(lease):
    return [block.refs for block in lease.blocks]


def cached(pool):
    """Cached pages in eviction order."""
    return [block.page for block in pool._pages.cached]


def drop_block(pool, hash):
    """Remove a block by force, so that the chain has a gap; False if the hash is unknown."""
    block = pool._index.get(hash)
    if block is None:
        return False
    pool._index.forget(block)
    if block.on_host:
        pool._pages.host.remove(block)
    elif not block.refs:
        pool._pages.cached.remove(block)
        pool._pages.free.append(block.page)
    return True


def drop_snapshot(index, hash):
    """Evict a snapshot by force; False if it is absent, being read, or being written."""
    snapshot = index._index.get(hash)
    if snapshot is None or snapshot.refs or not snapshot.ready:
        return False
    index._remove(snapshot)
    index._lost.add(hash)
    return True
