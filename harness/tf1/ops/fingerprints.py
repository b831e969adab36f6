"""FarmHash's Fingerprint64, by which ``tf.string_to_hash_bucket_fast`` spreads strings.

Source: https://github.com/google/farmhash (``farmhashna``). The numbers are the same for ever.
"""

from __future__ import annotations

import struct

_MASK = (1 << 64) - 1
_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F
_BLOCK = 64


def fingerprint64(text: bytes) -> int:
    """Returns the hash of a string, in [0, 2**64).

    Examples:
        >>> fingerprint64(b"hello") % 2**62
        3786372426573024488
    """
    size = len(text)
    if size <= 16:
        return _hash_up_to_16(text)
    if size > _BLOCK:
        return _hash_long(text)
    multiplier = _K2 + 2 * size & _MASK
    a = _word(text, 0) * (_K1 if size <= 32 else _K2) & _MASK
    b, c = _word(text, 8), _word(text, size - 8) * multiplier & _MASK
    d = _word(text, size - 16) * _K2 & _MASK
    y = _rotate(a + b, 43) + _rotate(c, 30) + d & _MASK
    z = _mix(y, a + _rotate(b + _K2, 18) + c, multiplier)
    if size <= 32:
        return z
    e, f = _word(text, 16) * multiplier & _MASK, _word(text, 24)
    g = (y + _word(text, size - 32)) * multiplier & _MASK
    h = (z + _word(text, size - 24)) * multiplier & _MASK
    return _mix(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, multiplier)


def _hash_up_to_16(text: bytes) -> int:
    size = len(text)
    multiplier = _K2 + 2 * size & _MASK
    if size >= 8:
        a, b = _word(text, 0) + _K2 & _MASK, _word(text, size - 8)
        c = _rotate(b, 37) * multiplier + a
        return _mix(c, (_rotate(a, 25) + b) * multiplier, multiplier)
    if size >= 4:
        first, last = (int.from_bytes(part, "little") for part in (text[:4], text[-4:]))
        return _mix(size + (first << 3), last, multiplier)
    if size:
        y, z = text[0] + (text[size >> 1] << 8), size + (text[-1] << 2)
        return _fold(y * _K2 ^ z * _K0) * _K2 & _MASK
    return _K2


def _hash_long(text: bytes) -> int:
    seed = 81
    x, y = seed, seed * _K1 + 113 & _MASK
    z = _fold(y * _K2 + 113) * _K2 & _MASK
    v, w = (0, 0), (0, 0)
    x = x * _K2 + _word(text, 0) & _MASK
    rest = len(text) - 1 & _BLOCK - 1
    for at in range(0, len(text) - 1 - rest, _BLOCK):
        x, y = _stir(text, at, x, y, v, _K1)
        x ^= w[1]
        y = y + v[0] + _word(text, at + 40) & _MASK
        z = _rotate(z + w[0], 33) * _K1 & _MASK
        v, w = _absorb(text, at, x, y, z, v, w, _K1)
        x, z = z, x
    # The last block overlaps the one before.
    at = len(text) - _BLOCK
    multiplier = _K1 + ((z & 0xFF) << 1) & _MASK
    w = w[0] + rest & _MASK, w[1]
    v = v[0] + w[0] & _MASK, v[1]
    w = w[0] + v[0] & _MASK, w[1]
    x, y = _stir(text, at, x, y, v, multiplier)
    x ^= w[1] * 9 & _MASK
    y = y + v[0] * 9 + _word(text, at + 40) & _MASK
    z = _rotate(z + w[0], 33) * multiplier & _MASK
    v, w = _absorb(text, at, x, y, z, v, w, multiplier)
    x, z = z, x
    first = _mix(v[0], w[0], multiplier) + _fold(y) * _K0 + z
    return _mix(first, _mix(v[1], w[1], multiplier) + x, multiplier)


def _stir(
    text: bytes, at: int, x: int, y: int, v: tuple[int, int], multiplier: int
) -> tuple[int, int]:
    x = _rotate(x + y + v[0] + _word(text, at + 8), 37) * multiplier & _MASK
    return x, _rotate(y + v[1] + _word(text, at + 48), 42) * multiplier & _MASK


def _absorb(
    text: bytes,
    at: int,
    x: int,
    y: int,
    z: int,
    v: tuple[int, int],
    w: tuple[int, int],
    multiplier: int,
) -> tuple[tuple[int, int], tuple[int, int]]:
    first = _hash_32(text, at, v[1] * multiplier, x + w[0])
    return first, _hash_32(text, at + 32, z + w[1], y + _word(text, at + 16))


def _hash_32(text: bytes, at: int, a: int, b: int) -> tuple[int, int]:
    """Returns two words of 32 bytes and two seeds."""
    w, x, y, z = struct.unpack_from("<4Q", text, at)
    a += w
    b = _rotate(b + a + z, 21)
    c = a
    a += x + y
    return a + z & _MASK, b + _rotate(a, 44) + c & _MASK


def _mix(u: int, v: int, multiplier: int) -> int:
    a = _fold((u ^ v) * multiplier)
    return _fold((v ^ a) * multiplier) * multiplier & _MASK


def _fold(value: int) -> int:
    value &= _MASK
    return value ^ value >> 47


def _rotate(value: int, bits: int) -> int:
    value &= _MASK
    return (value >> bits | value << 64 - bits) & _MASK


def _word(text: bytes, at: int) -> int:
    word: int = struct.unpack_from("<Q", text, at)[0]
    return word
