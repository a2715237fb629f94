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

from bertvision.featurestore.format.layout import TRANSFORM_SIZES

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
PRECISION, TOTAL = 12, 1 << 12
"""Bits of a probability, and what the frequencies of a class add up to."""
CLASSES, ONE_STEP, NARROW = TRANSFORM_SIZES["class"], 16, 9
"""Classes of coefficients by their deviation in steps, in quarters of octaves from 2^-4 to 2^2; the
class of one step; and the narrowest whose coefficients tell the class of a token. Wider ones have
bits beside the symbol."""
SYMBOLS = TRANSFORM_SIZES["symbol"]
"""Values from −24 to 24, and one that says that a larger one follows."""
MOST_BITS = 11
LARGEST = float(1 << 30)
"""Steps that a value has at most."""
NARROWEST, WIDEST, TOKEN_CLASSES = 32, 16, 512
"""Classes of tokens go from −32; beyond 16, at sixteen times the usual width, the step grows with
the token; and how many there are: as many as float32 has values for."""
CLASS_OF_TOKENS = 24
"""Class of coefficients that the classes of tokens are coded like."""
LOWEST_STATE = 1 << 16
LANES = 2
"""States that take turns, so that a processor works at several."""


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


def transform_encode(
    coefficients: Array,
    classes: Array,
    step: Any,
    widths: Array,
    offset: Any,
    frequencies: Array,
    starts: Array,
    decoded: Array,
    wides: Array,
    words: Array,
    counts: Array,
    result: Array,
    tokens: int,
    hidden: int,
) -> None:
    """Round coefficients, and fill the words of their entropy code from the last backwards.

    A range asymmetric numeral system (Duda 2013, "Asymmetric numeral systems", section 3) with a
    state of 32 bits, of which words of 16 are taken; the decoder reads in the opposite order.

    Args:
        coefficients: (tokens · hidden,) float32.
        classes: (hidden,) int64, the class of each coefficient of an ordinary token; they fall.
        step: float32 between neighbouring values of an ordinary token.
        widths: (`TOKEN_CLASSES`,) float32, a token's factor by its class.
        offset: float32 that is added to a magnitude in steps before it is cut off.
        frequencies: (classes · symbols,) int64, which add up to 4,096 in each class.
        starts: (classes · symbols,) int64, the sum of those before it in its class.
        decoded: (tokens · hidden,) float32, filled with what the decoder will make.
        wides: (tokens,) int64, filled with the class of each token.
        words: uint16, filled to its end.
        counts: (classes · symbols,) int64, to which the symbols are added.
        result: (2,) int64: the words that were filled, and 1 where some value is too large.
        tokens: Number of tokens.
        hidden: Number of coefficients.
    """
    place = np.int64(len(words))
    states = np.full(LANES, LOWEST_STATE, np.int64)
    result[1] = 0
    rounded = np.empty(hidden, np.int64)
    inverse = np.float32(1) / step
    weights = np.zeros(hidden, np.float32)
    for i in range(hidden):
        if classes[i] >= NARROW:
            squared = np.float64(2) ** (np.float64(classes[i] - ONE_STEP) / 2)
            weights[i] = 1 / (squared + 0.15)
    for token in range(tokens - 1, -1, -1):
        row = coefficients[token * hidden : (token + 1) * hidden]
        out = decoded[token * hidden : (token + 1) * hidden]
        wides[token] = wide = token_class(row, weights, inverse)
        raised = min(wide, np.int64(WIDEST))  # beyond it the step grows
        factor = np.float32(1)
        if wide > WIDEST:
            factor = widths[wide + NARROWEST] / widths[WIDEST + NARROWEST]
        width = np.float32(step * factor)
        inverse_width = np.float32(1) / width
        coded = np.int64(0)
        while coded < hidden and classes[coded] + raised >= 0:
            coded += 1
        for i in range(coded):
            steps = np.floor(np.float32(abs(row[i]) * inverse_width) + offset)
            if not steps < LARGEST:
                result[1] = 1
                steps = np.float32(0)
            rounded[i] = np.int64(steps) if row[i] >= 0 else -np.int64(steps)
            out[i] = np.float32(rounded[i]) * width
        for i in range(coded, hidden):
            out[i] = np.float32(0)
        for i in range(coded - 1, -1, -1):
            lane = (i + 1) % LANES
            wanted = classes[i] + raised
            states[lane], place = put(
                rounded[i], wanted, frequencies, starts, counts, words, states[lane], place
            )
        wanted = np.int64(CLASS_OF_TOKENS)
        states[0], place = put(wide, wanted, frequencies, starts, counts, words, states[0], place)
    for lane in range(LANES - 1, -1, -1):
        place -= 2
        words[place] = states[lane] >> 16
        words[place + 1] = states[lane] & 0xFFFF
    result[0] = len(words) - place


def transform_decode(
    words: Array,
    classes: Array,
    step: Any,
    widths: Array,
    intervals: Array,
    decoded: Array,
    wides: Array,
    result: Array,
    tokens: int,
    hidden: int,
) -> None:
    """Fill coefficients from the words of their entropy code; arguments as `transform_encode`'s.

    Args:
        words: uint16, all of one code.
        classes: (hidden,) int64.
        step: float32.
        widths: (`TOKEN_CLASSES`,) float32.
        intervals: (classes · 4,096,) uint32, for each number of 12 bits the interval that it is in:
            its symbol, its length and the place of the number in it, 8, 12 and 12 bits.
        decoded: (tokens · hidden,) float32, filled.
        wides: (tokens,) int64, filled.
        result: (1,) int64: 0, or 1 where the words are not of a code of so many tokens.
        tokens: Number of tokens.
        hidden: Number of coefficients.
    """
    result[0] = 1
    if len(words) < 2 * LANES:
        return
    states = np.empty(LANES, np.int64)
    for lane in range(LANES):
        states[lane] = (np.int64(words[2 * lane]) << 16) | np.int64(words[2 * lane + 1])
    place = np.int64(2 * LANES)
    for token in range(tokens):
        out = decoded[token * hidden : (token + 1) * hidden]
        wide, states[0], place = take(np.int64(CLASS_OF_TOKENS), intervals, words, states[0], place)
        if place < 0 or not -NARROWEST <= wide < TOKEN_CLASSES - NARROWEST:
            return
        wides[token] = wide
        raised = min(wide, np.int64(WIDEST))
        factor = np.float32(1)
        if wide > WIDEST:
            factor = widths[wide + NARROWEST] / widths[WIDEST + NARROWEST]
        width = np.float32(step * factor)
        i = 0
        while i < hidden and classes[i] + raised >= 0:
            lane = (i + 1) % LANES
            value, states[lane], place = take(
                classes[i] + raised, intervals, words, states[lane], place
            )
            if place < 0:
                return
            out[i] = np.float32(value) * width
            i += 1
        for rest in range(i, hidden):
            out[rest] = np.float32(0)
    if place == len(words) and (states == LOWEST_STATE).all():
        result[0] = 0


def token_class(row: Array, weights: Array, inverse: np.float32) -> np.int64:
    """The class of a token: quarters of octaves that its coefficients are wider than usual.

    Args:
        row: (hidden,) float32 coefficients.
        weights: (hidden,) float32, of the square of each in steps; 0 of those that tell nothing.
        inverse: Steps in one.
    """
    energy, used = np.float64(0), np.int64(0)
    most = np.float64(0)
    for i in range(len(row)):
        steps = np.float64(row[i]) * inverse  # whose square float32 may not have
        most = max(most, abs(steps))
        energy += steps * steps * weights[i]
        used += weights[i] > 0
    wide = np.float64(0)
    if used and energy > 0:
        wide = np.floor(2 * np.log2(energy / used) + 0.5)
    if most > 0:  # so that no value has more steps than the code takes
        wide = max(wide, WIDEST + np.ceil(4 * np.log2(most / (LARGEST / 4))))
    wide = min(max(wide, np.float64(-NARROWEST)), np.float64(TOKEN_CLASSES - NARROWEST - 1))
    return np.int64(wide)


def split_class(wanted: np.int64) -> tuple[np.int64, np.int64]:
    """The class of a symbol's table, and how many bits of the value stand beside the symbol."""
    wanted = min(max(wanted, np.int64(0)), np.int64(CLASSES - 1 + 4 * MOST_BITS))
    bits = max(np.int64(0), (wanted - (CLASSES - 1) + 3) >> 2)
    return wanted - 4 * bits, bits


def put(
    value: np.int64,
    wanted: np.int64,
    frequencies: Array,
    starts: Array,
    counts: Array,
    words: Array,
    state: np.int64,
    place: np.int64,
) -> tuple[np.int64, np.int64]:
    """Add a value to the code; the state and the first word after it."""
    table, bits = split_class(wanted)
    half = (np.int64(1) << bits) >> 1
    high = (value + half) >> bits
    low = (value + half) & ((np.int64(1) << bits) - 1)
    if bits:
        state, place = push(np.int64(TOTAL) >> bits, low * (TOTAL >> bits), words, state, place)
    symbol = 2 * abs(high) - (1 if high > 0 else 0)
    at = table * SYMBOLS + min(symbol, np.int64(SYMBOLS - 1))
    if symbol >= SYMBOLS - 1 or frequencies[at] == 0:
        for _ in range(3):
            state, place = push(np.int64(1), symbol & (TOTAL - 1), words, state, place)
            symbol >>= PRECISION
        at = (table + 1) * SYMBOLS - 1
    counts[at] += 1
    return push(frequencies[at], starts[at], words, state, place)


def push(
    frequency: np.int64, start: np.int64, words: Array, state: np.int64, place: np.int64
) -> tuple[np.int64, np.int64]:
    """Add an interval to the code; the state and the first word after it."""
    wide = np.int64(frequency)
    if state >= wide << (32 - PRECISION):
        place -= 1
        words[place] = state & 0xFFFF
        state >>= 16
    quotient = np.int64(np.float64(state) / np.float64(wide))  # exact, and faster than of integers
    return (quotient << PRECISION) + (state - quotient * wide) + np.int64(start), place


def take(
    wanted: np.int64, intervals: Array, words: Array, state: np.int64, place: np.int64
) -> tuple[np.int64, np.int64, np.int64]:
    """Take the next value from the code; with it the state and the next word, −1 at a wrong end."""
    table, bits = split_class(wanted)
    interval = np.int64(intervals[table * TOTAL + (state & (TOTAL - 1))])
    symbol = interval >> 24
    within = interval & (TOTAL - 1)
    state, place = pull(((interval >> PRECISION) & (TOTAL - 1)) + 1, within, words, state, place)
    if symbol == SYMBOLS - 1:
        symbol = np.int64(0)
        for _ in range(3):
            symbol = (symbol << PRECISION) | (state & (TOTAL - 1))
            state, place = pull(np.int64(1), np.int64(0), words, state, place)
    high = -(symbol >> 1) if symbol % 2 == 0 else (symbol + 1) >> 1
    if not bits:
        return high, state, place
    slot = state & (TOTAL - 1)
    low = slot >> (PRECISION - bits)
    within = slot & ((TOTAL >> bits) - 1)
    state, place = pull(np.int64(TOTAL) >> bits, within, words, state, place)
    return (high << bits) + low - ((np.int64(1) << bits) >> 1), state, place


def pull(
    frequency: np.int64, within: np.int64, words: Array, state: np.int64, place: np.int64
) -> tuple[np.int64, np.int64]:
    """Take an interval from the code; the state and the next word."""
    state = frequency * (state >> PRECISION) + within
    if state < LOWEST_STATE:
        if place < 0 or place >= len(words):
            return np.int64(LOWEST_STATE), np.int64(-1)
        state = (state << 16) | np.int64(words[place])
        place += 1
    return state, place


HELPERS = (
    *(standardise, largest, in_steps, nearest, restore, token_class, split_class),
    *(put, push, take, pull),
)
"""Functions that the others call."""
