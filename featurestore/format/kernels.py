"""Arithmetic of the quantised encodings as loops over rows, for `compiled` to have numba compile.

A row is a token in a layer. Each function gives the bits of its counterpart in `encoding`, on every
processor: it rounds to float32 after each product and each sum, and only integers are compared in
another order. numba knows neither bfloat16 nor float16 there, so both are the integers of their
bits. Arrays are one-dimensional and contiguous, from the first value to the last; the strides of
tokens and layers stand beside them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any
"""A one-dimensional array, whose type is that of the signatures in `compiled`."""
Strides: TypeAlias = tuple[int, int]
"""Values from a token to the next, and from a layer to the next."""

_BLOCK_TOKENS = 64  # of a layer at a time: long runs of codes, and outputs that are near
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_HALF_INFINITY = np.uint32(0x7C00 << 13)
_HALF_TO_SINGLE = np.float32(2.0**112)
_SMALLEST_STEP = np.float32(1e-30)
_INTEGERS = np.float32(3 << 22)
"""Its last digit is 1: a small value that is added is rounded to nearest even, and stands in the
last bits in two's complement."""


def standardise(
    row: Array, half: bool, mean: Array, inverse_std: Array, values: Array
) -> np.uint32:
    """Fill standardised values from the bits of a row of hidden states.

    Args:
        row: (hidden,) uint32 bits of float32, or uint16 ones.
        half: Whether 16 bits are those of a float16 and not of a bfloat16.
        mean: (hidden,) float32.
        inverse_std: (hidden,) float32.
        values: (hidden,) float32.

    Returns:
        The bits of the largest magnitude (see `largest`).
    """
    if half:
        # a product moves the exponent to where float32 has it, of subnormal numbers too
        for c in range(len(row)):
            given = np.uint32(row[c])
            magnitude = (given & np.uint32(0x7FFF)) << np.uint32(13)
            moved = np.float32(np.uint32(magnitude).view(np.float32) * _HALF_TO_SINGLE)
            bits = moved.view(np.uint32) | ((given & np.uint32(0x8000)) << np.uint32(16))
            bits = bits if magnitude < _HALF_INFINITY else bits | _INFINITY
            values[c] = (np.uint32(bits).view(np.float32) - mean[c]) * inverse_std[c]
    else:
        shift = np.uint32(32 - 8 * row.itemsize)
        for c in range(len(row)):
            value = np.uint32(np.uint32(row[c]) << shift).view(np.float32)
            values[c] = (value - mean[c]) * inverse_std[c]
    return largest(values.view(np.uint32))


def largest(bits: Array) -> np.uint32:
    """The largest bits of a magnitude: those of NaN are above infinity's, and these above all."""
    most = np.uint32(0)
    for c in range(len(bits)):
        most = max(most, bits[c] & _MAGNITUDE)
    return most


def in_steps(value: np.float32, inverse_step: np.float32) -> np.uint32:
    """A value in steps, rounded, in the last bits."""
    return np.float32(np.float32(value * inverse_step) + _INTEGERS).view(np.uint32)


def restore(values: Array, mean: Array, std: Array, row: Array, is_finite: Any) -> None:
    """Fill a row of hidden states from standardised values.

    Args:
        values: (hidden,) float32.
        mean: (hidden,) float32.
        std: (hidden,) float32.
        row: (hidden,) float32, or uint16 bits of bfloat16.
        is_finite: Whether no value can be NaN, whose bits must not be rounded.
    """
    if row.itemsize == 4:
        for c in range(len(row)):
            row[c] = values[c] * std[c] + mean[c]
    elif is_finite:
        for c in range(len(row)):
            bits = np.float32(values[c] * std[c] + mean[c]).view(np.uint32)
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            row[c] = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    else:
        for c in range(len(row)):
            bits = np.float32(values[c] * std[c] + mean[c]).view(np.uint32)
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
            row[c] = rounded if (bits & _MAGNITUDE) <= _INFINITY else np.uint32(0x7FC0)


def nearest(step: np.float32, middles: Array) -> Any:
    """The scale of int4 whose step is nearest to one, given where they meet, (255,) float32."""
    bits = np.float32(step).view(np.uint32)
    # of the octave that the step is in; a search takes a branch for each of its bits
    octave = np.int64((bits & _MAGNITUDE) >> np.uint32(23)) - np.int64(127)
    first = min(max(np.int64(64) + np.int64(8) * octave, np.int64(0)), np.int64(len(middles) - 8))
    scale = first
    for middle in middles[first : first + 8]:
        scale = np.int64(scale + np.int64(middle < step))
    return scale


def encode_int8(
    states: Array,
    states_strides: Strides,
    half: bool,
    mean: Array,
    inverse_std: Array,
    codes: Array,
    codes_strides: Strides,
    scale: Array,
    tokens: int,
    layers: int,
) -> None:
    """Fill codes and scale; where a row does not fit, its scale is infinite or NaN.

    Args:
        states: Bits of the hidden states (see `standardise`).
        states_strides: Their strides.
        half: See `standardise`.
        mean: (layers · hidden,) float32.
        inverse_std: (layers · hidden,) float32.
        codes: int8.
        codes_strides: Their strides.
        scale: (tokens · layers,) float32.
        tokens: Number of tokens.
        layers: Number of layers.
    """
    hidden = len(mean) // layers
    values = np.empty(hidden, np.float32)
    for token in range(tokens):
        for layer in range(layers):
            channels = slice(layer * hidden, (layer + 1) * hidden)
            begin = token * states_strides[0] + layer * states_strides[1]
            row = states[begin : begin + hidden]
            most = standardise(row, half, mean[channels], inverse_std[channels], values)
            step = np.float32(np.uint32(most).view(np.float32) / np.float32(127))
            scale[token * layers + layer] = step
            inverse = np.float32(1) / max(step, _SMALLEST_STEP)
            begin = token * codes_strides[0] + layer * codes_strides[1]
            out = codes[begin : begin + hidden]
            for c in range(hidden):
                out[c] = in_steps(values[c], inverse)


def encode_int4(
    states: Array,
    states_strides: Strides,
    half: bool,
    mean: Array,
    inverse_std: Array,
    codes: Array,
    codes_strides: Strides,
    scale: Array,
    step: Array,
    steps: Array,
    middles: Array,
    group: int,
    tokens: int,
    layers: int,
) -> None:
    """Fill codes, scale and the steps that were wanted; arguments as those of `encode_int8`, and.

    Args:
        states: Bits of the hidden states (see `standardise`).
        states_strides: Their strides.
        half: See `standardise`.
        mean: (layers · hidden,) float32.
        inverse_std: (layers · hidden,) float32.
        codes: uint8, two channels each.
        codes_strides: Their strides.
        scale: (tokens · layers · groups,) uint8.
        step: The same, float32: infinite or NaN, or larger than all others, where a row does not
            fit.
        steps: (256,) float32, the step of each scale.
        middles: (255,) float32 where the scales meet.
        group: Number of channels that share a scale.
        tokens: Number of tokens.
        layers: Number of layers.
    """
    hidden = len(mean) // layers
    packed = hidden // 2
    values, inverse = np.empty(hidden, np.float32), np.empty(hidden, np.float32)
    bits, rest, inverse_rest = values.view(np.uint32), values[packed:], inverse[packed:]
    at = 0
    for token in range(tokens):
        for layer in range(layers):
            channels = slice(layer * hidden, (layer + 1) * hidden)
            begin = token * states_strides[0] + layer * states_strides[1]
            row = states[begin : begin + hidden]
            standardise(row, half, mean[channels], inverse_std[channels], values)
            for first in range(0, hidden, group):
                most = np.uint32(largest(bits[first : first + group]))
                step[at] = np.float32(most.view(np.float32) / np.float32(7))
                scale[at] = nearest(step[at], middles)
                nearest_step = max(steps[scale[at]], _SMALLEST_STEP)
                inverse[first : first + group] = np.float32(1) / nearest_step
                at += 1
            begin = token * codes_strides[0] + layer * codes_strides[1]
            out = codes[begin : begin + packed]
            for c in range(packed):
                lower = in_steps(values[c], inverse[c]) + np.uint32(8)
                upper = in_steps(rest[c], inverse_rest[c]) + np.uint32(8)
                out[c] = (lower & np.uint32(15)) | (upper << np.uint32(4))


def decode_int8(
    codes: Array,
    codes_strides: Strides,
    scale: Array,
    mean: Array,
    std: Array,
    out: Array,
    out_strides: Strides,
    tokens: int,
    layers: int,
) -> None:
    """Fill hidden states from codes.

    Args:
        codes: int8.
        codes_strides: Their strides.
        scale: (tokens · layers,) float32.
        mean: (layers · hidden,) float32.
        std: (layers · hidden,) float32.
        out: float32, or uint16 bits of bfloat16.
        out_strides: Their strides.
        tokens: Number of tokens.
        layers: Number of layers.
    """
    hidden = len(mean) // layers
    values = np.empty(hidden, np.float32)
    for block in range(0, tokens, _BLOCK_TOKENS):
        for layer in range(layers):
            channels = slice(layer * hidden, (layer + 1) * hidden)
            means, stds = mean[channels], std[channels]
            moments = max(largest(means.view(np.uint32)), largest(stds.view(np.uint32)))
            for token in range(block, min(block + _BLOCK_TOKENS, tokens)):
                begin = token * codes_strides[0] + layer * codes_strides[1]
                row = codes[begin : begin + hidden]
                step = scale[token * layers + layer]
                for c in range(hidden):
                    values[c] = np.float32(row[c]) * step
                is_finite = moments < _INFINITY and abs(step) < np.inf
                begin = token * out_strides[0] + layer * out_strides[1]
                restore(values, means, stds, out[begin : begin + hidden], is_finite)


def decode_int4(
    codes: Array,
    codes_strides: Strides,
    scale: Array,
    steps: Array,
    group: int,
    mean: Array,
    std: Array,
    out: Array,
    out_strides: Strides,
    tokens: int,
    layers: int,
) -> None:
    """Fill hidden states from codes.

    Args:
        codes: uint8, two channels each.
        codes_strides: Their strides.
        scale: (tokens · layers · groups,) uint8.
        steps: (256,) float32, the step of each scale.
        group: Number of channels that share a scale.
        mean: (layers · hidden,) float32.
        std: (layers · hidden,) float32.
        out: float32, or uint16 bits of bfloat16.
        out_strides: Their strides.
        tokens: Number of tokens.
        layers: Number of layers.
    """
    hidden = len(mean) // layers
    packed, groups = hidden // 2, (hidden + group - 1) // group
    values = np.empty(hidden, np.float32)
    rest = values[packed:]
    for block in range(0, tokens, _BLOCK_TOKENS):
        for layer in range(layers):
            channels = slice(layer * hidden, (layer + 1) * hidden)
            means, stds = mean[channels], std[channels]
            moments = max(largest(means.view(np.uint32)), largest(stds.view(np.uint32)))
            for token in range(block, min(block + _BLOCK_TOKENS, tokens)):
                begin = token * codes_strides[0] + layer * codes_strides[1]
                row = codes[begin : begin + packed]
                at = (token * layers + layer) * groups
                for first in range(0, hidden, group):
                    values[first : first + group] = steps[scale[at]]
                    at += 1
                for c in range(packed):
                    lower = np.int32(row[c]) & np.int32(15)
                    values[c] = np.float32(lower - np.int32(8)) * values[c]
                for c in range(packed):
                    upper = np.int32(row[c]) >> np.int32(4)
                    rest[c] = np.float32(upper - np.int32(8)) * rest[c]
                begin = token * out_strides[0] + layer * out_strides[1]
                restore(values, means, stds, out[begin : begin + hidden], moments < _INFINITY)


HELPERS = (standardise, largest, in_steps, nearest, restore)
"""Functions that the others call."""
