"""A prompt, and helpers for tests of the prefix index."""

from __future__ import annotations

from jaxkv.serve.prefix import PrefixIndex, root_hash

ROOT = root_hash(policy="full")
P = list(range(100, 114))  # three full blocks of 4 and a tail of 2


def blocks(capacity=None, chunk=4, **options):
    """An index of blocks."""
    return PrefixIndex(chunk, (capacity, 0), linked=True, **options)


def snapshots(capacity=None, chunk=4, where="last+branch", host=0, **options):
    """An index of snapshots."""
    return PrefixIndex(chunk, (capacity, host), where=where, **options)


def admit(index, tokens, root=ROOT, save=None, owner=None):
    """Prefill a prompt and store what is planned, or what is in `save`; returns the lease."""
    lease = index.hold(index.hash_prompt(tokens, root, owner))
    index.start(lease)
    for boundary in lease.save if save is None else save:
        if (entry := index.claim(lease.prompt, boundary, lease)) is not None:
            index.publish(entry, lease)
    return lease


def serve(index, tokens, root=ROOT, save=None, owner=None):
    """Serve a whole request; returns its lease, which is released."""
    lease = admit(index, tokens, root, save, owner)
    index.release(lease)
    return lease


def cached(index, tokens, root=ROOT):
    """The boundary from which a prompt would resume."""
    entries = index.matches(index.hash_prompt(tokens, root))
    return max((entry.boundary for entry in entries), default=0)


def missed(index, tokens):
    """The tokens of a prompt that miss, by reason."""
    before = dict(index.counts.missed)
    serve(index, tokens, save=())
    counts = {reason: count - before[reason] for reason, count in index.counts.missed.items()}
    return {reason: count for reason, count in counts.items() if count}


def unused(index):
    """The places of unused entries on the device, in eviction order."""
    return [entry.index for entry in index.tiers[0].lru if not entry.refs]


def refs(lease):
    return [entry.refs for entry in lease.entries]


def drop(index, hash):
    """Evict an entry by force; False if it is absent, or in use."""
    entry = index._entries.get(hash)
    if entry is None or entry.refs:
        return False
    del index._entries[hash]
    index.tiers[entry.level].remove(entry)
    index._lost.add(hash)
    return True
