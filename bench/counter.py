"""What: the counter-based generator of src/train, in Python.
Why: golden files and torch's runs draw the same numbers as the training stack.
Never: used for a benchmark's inputs.
"""

MASK = (1 << 64) - 1


def mix(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def key_of(seed, stream=3):
    return mix(mix(seed) ^ ((stream * 0xD1342543DE82EF95) & MASK))
