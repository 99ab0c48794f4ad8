"""The draws of policies, from seeds and positions."""


def uniform(number, rng):
    """A uniform draw from [0, 1)."""
    return (priority(number % 2**32, rng) >> 8) / 2**24


def priority(position, rng):
    """The uint32 draw of a position: two rounds of an integer hash, a bijection for each rng."""
    return _mix(_mix((position + int(rng[0])) % 2**32) ^ int(rng[1]))


def _mix(x):
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) % 2**32
    x = ((x ^ (x >> 15)) * 0x735A2D97) % 2**32
    return x ^ (x >> 15)
