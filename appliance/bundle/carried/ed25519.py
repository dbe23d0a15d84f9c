"""Verifies Ed25519 signatures with nothing but Python, for a machine on which nothing is installed yet.

It follows the reference code of RFC 8032, section 6, and is strict about encodings. It takes 10 ms. It signs nothing
and handles no secret, so it need not run in constant time. Signing is `cryptography`'s (appliance.bundle.signing).
"""

from __future__ import annotations

import hashlib

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_ROOT_OF_MINUS_ONE = pow(2, (_P - 1) // 4, _P)
Point = tuple[int, int, int, int]  # extended coordinates: X, Y, Z, T with x = X/Z, y = Y/Z, xy = T/Z


def verify(public: bytes, message: bytes, signature: bytes) -> bool:
    """public: 32 bytes. signature: 64 bytes; one of another length does not verify."""
    if len(public) != 32 or len(signature) != 64:
        return False
    key, scalar = _decoded(public), int.from_bytes(signature[32:], "little")
    if key is None or scalar >= _ORDER:
        return False
    digest = hashlib.sha512(signature[:32] + public + message).digest()
    challenge = int.from_bytes(digest, "little") % _ORDER
    x, y, z, t = _times(challenge, key)
    return _encoded(_sum(_times(scalar, _BASE), (-x % _P, y, z, -t % _P))) == signature[:32]


def _sum(one: Point, other: Point) -> Point:
    a = (one[1] - one[0]) * (other[1] - other[0]) % _P
    b = (one[1] + one[0]) * (other[1] + other[0]) % _P
    c = 2 * one[3] * other[3] * _D % _P
    d = 2 * one[2] * other[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _times(scalar: int, point: Point) -> Point:
    total: Point = (0, 1, 1, 0)
    while scalar:
        if scalar & 1:
            total = _sum(total, point)
        point = _sum(point, point)
        scalar >>= 1
    return total


def _x_of(y: int, odd: int) -> int | None:
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    if square == 0:
        return None if odd else 0
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * _ROOT_OF_MINUS_ONE % _P
    if (x * x - square) % _P:
        return None
    return x if x & 1 == odd else _P - x


def _decoded(data: bytes) -> Point | None:
    number = int.from_bytes(data, "little")
    y, odd = number & (2**255 - 1), number >> 255
    x = _x_of(y, odd) if y < _P else None
    return None if x is None else (x, y, 1, x * y % _P)


def _encoded(point: Point) -> bytes:
    inverse = pow(point[2], -1, _P)
    x, y = point[0] * inverse % _P, point[1] * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")


_BASE_Y = 4 * pow(5, -1, _P) % _P
_BASE_X = _x_of(_BASE_Y, 0)
assert _BASE_X is not None
_BASE: Point = (_BASE_X, _BASE_Y, 1, _BASE_X * _BASE_Y % _P)
