"""The rule of merge and reduce."""

import math

from tests.core.oracle.draws import priority, uniform


def merge_and_reduce(sinks, size, levels, slots, choose, weighted=1):
    """Sinks, a window, and the evicted tokens in levels of `slots`. A full level is halved.

    choose(numbers, uniforms, inputs) returns the half that moves up one level. weighted: the
    exponent of a sampled token's weight, 0 if it counts once.
    """

    def rule(inputs):
        first, newest, filled, num_evicted, raised = [], [], [[] for _ in range(levels)], 0, 0
        # The number of evicted tokens before each token, and when level 0 was last emptied.
        evicted_before, emptied = {}, 0
        for number in range(inputs.tokens):
            (first if len(first) < sinks else newest).append(number)
            if len(newest) > size:
                evicted, group = newest.pop(0), 2**raised
                begin = num_evicted - num_evicted % group
                evicted_before[evicted] = num_evicted
                if num_evicted - begin == priority(begin, inputs.rng) * group // 2**32:
                    filled[0].append(evicted)
                num_evicted, level = num_evicted + 1, 0
                while num_evicted % group == 0 and len(filled[level]) == slots:
                    at = num_evicted * 0x9E3779B1 + level * slots
                    uniforms = [uniform(at + i, inputs.rng) for i in range(slots)]
                    half = choose(filled[level], uniforms, inputs)
                    if level == levels - 1:
                        filled[level], raised = half, raised + 1
                        break
                    emptied = num_evicted
                    filled[level] = []
                    level += 1
                    filled[level] += half
            places, at = {}, len(first)
            for level in range(levels - 1, 0, -1):
                places |= {n: at + i for i, n in enumerate(filled[level])}
                at += len(filled[level])
            # A group of level 0 has its position from its first token on.
            places |= {n: at + ((evicted_before[n] - emptied) >> raised) for n in filled[0]}
            at += -(-(num_evicted - emptied) // 2**raised)
            places |= {n: at + i for i, n in enumerate(newest)}
            places |= {n: i for i, n in enumerate(first)}
            view = [(n, 0.0) for n in first + newest]
            for level, numbers in enumerate(filled):
                view += [(n, weighted * (level + raised) * math.log(2)) for n in numbers]
            yield sorted(view), sorted(view), [places[n] for n, _ in sorted(view)]

    return rule
