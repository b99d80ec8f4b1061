"""The values of all codes of numbers of 4 and 8 bits."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NUM_CODES = 256
_EXPONENT_BIAS = 127
_POWERS_OF_TWO = "float8_e8m0fnu"
_EIGHT_BIT = {
    "float8_e4m3fn": (4, 7, "fn"),
    "float8_e4m3fnuz": (4, 8, "fnuz"),
    "float8_e5m2": (5, 15, "ieee"),
    "float8_e5m2fnuz": (5, 16, "fnuz"),
}
"""(bits of the exponent, its bias, which patterns are not numbers). "fn": the last one. "fnuz": that of -0. "ieee": those
of the largest exponent, the first of which is infinity.

Source: torch 2.13, torch/headeronly/util/Float8_*.h.
"""


@cache
def code_values(dtype: str) -> numpy.ndarray:
    """Return the values of all 256 codes of a dtype of 8 bits, in float64; the array is not to be changed."""
    import numpy

    codes = numpy.arange(NUM_CODES)
    if dtype == "int8":
        return codes.astype("i1").astype("f8")
    if dtype == _POWERS_OF_TWO:
        return numpy.append(powers_of_two()[:-1], numpy.nan)
    exponent_bits, bias, special = _EIGHT_BIT[dtype]
    mantissa_bits = 7 - exponent_bits
    positive = codes[: NUM_CODES // 2]
    exponents, mantissas = positive >> mantissa_bits, positive & (1 << mantissa_bits) - 1
    scaled = mantissas + ((exponents > 0) << mantissa_bits)
    values = numpy.ldexp(scaled.astype("f8"), numpy.maximum(exponents, 1) - bias - mantissa_bits)
    if special == "ieee":
        values[exponents == exponents.max()] = numpy.nan
        values[exponents.argmax()] = numpy.inf
    elif special == "fn":
        values[-1] = numpy.nan
    negative = -values
    if special == "fnuz":  # NaN instead of -0
        negative[0] = numpy.nan
    return numpy.concatenate([values, negative])


@cache
def powers_of_two() -> numpy.ndarray:
    """Return the values of bytes that are exponents with a bias of 127, in float64; 255 is 2^128, infinite in float32."""
    import numpy

    return numpy.ldexp(1.0, numpy.arange(NUM_CODES) - _EXPONENT_BIAS)
