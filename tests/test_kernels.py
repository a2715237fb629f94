"""Compiled kernels give the bits that torch gives; nothing waits for them, or needs them."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import Made, shard_path

from bertvision.errors import CorruptStoreError
from bertvision.featurestore import readahead
from bertvision.featurestore.format import compiled, shard
from bertvision.featurestore.format.compiled import KERNELS, Kernels
from bertvision.featurestore.format.encoding import (
    ChannelStats,
    Encoded,
    decode,
    decode_numpy,
    encode,
)
from bertvision.featurestore.format.layout import get_encoding
from bertvision.featurestore.format.shard import ShardReader
from bertvision.featurestore.stream import ActivationLoader

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
BITS = {2: torch.int16, 4: torch.int32}
_Result = TypeVar("_Result")


@contextmanager
def without_kernels() -> Iterator[None]:
    """Have torch do everything, as before a kernel is ready."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KERNELS, "_ready", {})
        patch.setattr(KERNELS, "_asked", set(KERNELS.names))
        yield


def both_ways(call: Callable[[], _Result]) -> tuple[_Result, _Result]:
    """Results of a call by kernels, and by torch."""
    assert KERNELS.make()
    by_kernels = call()
    with without_kernels():
        return by_kernels, call()


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two arrays have the same bits; one NaN is as good as another."""
    nan = x.isnan() & y.isnan()
    bits = BITS[x.element_size()]
    return bool((nan | (x.contiguous().view(bits) == y.contiguous().view(bits))).all())


@st.composite
def states(draw: st.DrawFn) -> torch.Tensor:
    """Hidden states of any layout: ordinary ones of any size, or any bits, NaN and infinity too."""
    dtype = draw(st.sampled_from(FLOATS))
    shape = draw(st.integers(1, 9)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 140))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["normal", "halves", "bits"]))
    if kind == "bits":
        size = np.uint32 if dtype == torch.float32 else np.uint16
        x = torch.from_numpy(rng.integers(0, np.iinfo(size).max + 1, shape, dtype=size)).view(dtype)
    elif kind == "halves":  # ties of rounding: a step is 1 where the largest is 127 or 7
        x = torch.from_numpy(rng.integers(-14, 15, shape) / 2).to(dtype)
        x[..., 0] = draw(st.sampled_from([7.0, 127.0]))
    else:
        x = torch.from_numpy(rng.normal(0, 10 ** draw(st.floats(-45, 38)), shape)).to(dtype)
    if draw(st.booleans()):
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    return x


@pytest.mark.parametrize("name", ["int8", "int4"])
@given(x=states(), seed=st.integers(0, 99), plain=st.booleans(), strided=st.booleans())
@settings(max_examples=60, deadline=None)
def test_kernels_give_the_bits_of_torch(
    name: str, x: torch.Tensor, seed: int, plain: bool, strided: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    moments = torch.randn(2, *x.shape[1:], generator=generator)
    stats = ChannelStats(moments[0], moments[1].exp())
    if plain:
        stats = ChannelStats(torch.zeros(x.shape[1:]), torch.ones(x.shape[1:]))
    encoding = get_encoding(name)

    def encoded() -> Encoded:
        shape = x.shape[1], x.shape[0] + 2, encoding.codes_size(x.shape[2])
        room = torch.zeros(shape, dtype=encoding.torch_dtype)[:, 1:-1].transpose(0, 1)
        return encode(x, encoding, stats, nonfinite="record", out=room if strided else None)

    by_kernels, by_torch = both_ways(encoded)
    codes, scale = by_torch.codes, by_torch.scale
    assert scale is not None
    assert by_kernels.scale is not None
    assert by_kernels.nonfinite == by_torch.nonfinite
    assert torch.equal(by_kernels.codes, codes)
    assert torch.equal(by_kernels.scale.view(torch.uint8), scale.view(torch.uint8))
    for dtype in FLOATS:
        y, z = both_ways(lambda dtype=dtype: decode(codes, scale, stats, dtype))  # type: ignore[misc]
        assert same_bits(y, z)
    in_numpy = decode_numpy(codes.numpy(), scale.numpy(), stats, encoding)
    assert same_bits(torch.from_numpy(in_numpy), decode(codes, scale, stats))


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_of_either_sign_have_one_step(name: str, zero: float) -> None:
    """The larger of two zeros has the sign of either, by where it stands in a vector of lanes."""
    stats = ChannelStats(torch.zeros(2, 32), torch.ones(2, 32))
    for tokens in (1, 8, 17):
        x = torch.full((tokens, 2, 32), zero)
        for made in both_ways(lambda x=x: encode(x, get_encoding(name), stats)):  # type: ignore[misc]
            assert made.scale is not None
            assert not made.scale.float().signbit().any()
            assert torch.equal(made.codes, made.codes[:1, :1].expand_as(made.codes))


def test_values_that_are_no_numbers_stay_so() -> None:
    """Bits of NaN must not be rounded to those of zero."""
    scale = torch.tensor([[np.nan, np.inf, -np.inf, 1.0]])
    scale.view(torch.int32)[0, 0] = 0x7FFFFFFF
    codes = torch.arange(-4, 4, dtype=torch.int8).expand(1, 4, 8)
    stats = ChannelStats(torch.zeros(4, 8), torch.ones(4, 8))
    stats.mean.view(torch.int32)[3, 2] = 0x7FFFFFFF
    for dtype in (torch.float32, torch.bfloat16):
        x, y = both_ways(lambda dtype=dtype: decode(codes, scale, stats, dtype))  # type: ignore[misc]
        assert same_bits(x, y)
        assert x[0].isnan().sum() == 8 + 1 + 1 + 1


def work(kernels: Kernels, name: str = "decode_int8 float32") -> None:
    """Do as much without a kernel as makes it worth to be made."""
    assert kernels.get(name, compiled._WORTH_BYTES) is None


def wait(kernels: Kernels, name: str = "decode_int8 float32") -> Any:
    """The kernel that a thread is making."""
    while (thread := kernels._thread) is not None:
        thread.join()
    return kernels.get(name, 0)


def test_a_kernel_is_made_in_the_background_once_it_is_worth_it() -> None:
    kernels = Kernels()
    assert kernels.get("decode_int8 float32", 1000) is None
    assert kernels._thread is None
    work(kernels)
    assert wait(kernels) is not None


def test_without_numba_torch_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    kernels = Kernels()
    with caplog.at_level(logging.DEBUG, logger=compiled.__name__):
        for _ in range(3):
            work(kernels)
            assert wait(kernels) is None
        assert not kernels.make()
    # each kernel is tried once, and says so to nobody
    assert [r.levelname for r in caplog.records] == ["DEBUG"] * len(kernels.names)


def test_a_kernel_that_cannot_be_compiled_takes_no_other_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(compiled._SIGNATURES, "encode_int6 float32", "int64")
    kernels = Kernels()
    assert not kernels.make("encode_int6 float32")
    assert kernels.get("encode_int6 float32", 1 << 40) is None
    kernels.make("decode_int8 float32")
    assert kernels.get("decode_int8 float32", 1) is not None


def test_without_a_folder_for_its_cache_a_kernel_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import numba.core.caching

    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])
    kernels = Kernels()
    assert kernels.make("decode_int8 float32")
    kernel = kernels.get("decode_int8 float32", 0)
    out = np.zeros(6, np.float32)
    scale, mean, std = (np.full(n, 2, np.float32) for n in (1, 6, 6))
    kernel(np.arange(6, dtype=np.int8), (6, 6), scale, mean, std, out, (6, 6), 1, 1)  # type: ignore[misc]
    assert out.tolist() == [2, 6, 10, 14, 18, 22]


def test_a_fork_waits_for_the_kernel_that_is_being_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The child would find imports and the compiler locked by a thread that it has not got."""
    begun, steps, has_begun = [], [], threading.Event()

    def slowly(name: str) -> Callable[..., None]:
        begun.append(name)
        has_begun.set()
        time.sleep(0.2)  # the fork comes meanwhile
        steps.append(name)
        return print

    monkeypatch.setattr(compiled, "_compiled", slowly)
    monkeypatch.setattr(KERNELS, "_ready", {})
    monkeypatch.setattr(KERNELS, "_asked", set())
    work(KERNELS)
    work(KERNELS, "decode_int8 bfloat16")
    has_begun.wait()
    if (child := os.fork()) == 0:
        sure = steps == begun and KERNELS._thread is None
        work(KERNELS, "decode_int4 float32")  # of the child's own
        os._exit(0 if sure and wait(KERNELS, "decode_int4 float32") is print else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert wait(KERNELS, "decode_int8 bfloat16") is print


KNOWN = """
import hashlib, sys
import numpy as np, torch
from bertvision.featurestore.format.compiled import KERNELS
from bertvision.featurestore.format.encoding import ChannelStats, decode, encode
from bertvision.featurestore.format.layout import get_encoding

assert KERNELS.make() == (sys.argv[1] == "kernels")
rng = np.random.default_rng(0)
x = torch.from_numpy(rng.normal(0, 3, (70, 3, 200)).astype(np.float32))
mean, std = (torch.from_numpy(rng.uniform(0.1, 2, (3, 200)).astype(np.float32)) for _ in range(2))
digest = hashlib.sha256()
for name in ("int8", "int4"):
    for given in (x, x.bfloat16(), x.half()):
        codes, scale, _ = encode(given, get_encoding(name), ChannelStats(mean, std))
        digest.update(codes.numpy().tobytes() + scale.numpy().tobytes())
        for dtype in (torch.float32, torch.bfloat16):
            bits = decode(codes, scale, ChannelStats(mean, std), dtype).view(torch.uint8)
            digest.update(bits.numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_processors_with_and_without_avx512_give_the_same_bits(tmp_path: Path) -> None:
    digests = set()
    for way, environment in (
        ("kernels", {}),
        ("kernels", {"NUMBA_CPU_NAME": "haswell", "NUMBA_CACHE_DIR": str(tmp_path)}),
        ("torch", {"NUMBA_CACHE_DIR": "/nowhere", "PYTHONPATH": str(tmp_path)}),
        ("kernels", {"ATEN_CPU_CAPABILITY": "default"}),
    ):
        if way == "torch":  # a numba that does not import
            (tmp_path / "numba.py").write_text("raise ImportError")
        done = subprocess.run(
            [sys.executable, "-c", KNOWN, way],
            capture_output=True,
            text=True,
            env=os.environ
            | environment
            | {"PYTHONPATH": os.pathsep.join([environment.get("PYTHONPATH", ""), *sys.path])},
        )
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout)
    assert len(digests) == 1


def test_arrays_that_no_kernel_takes_are_left_to_torch() -> None:
    x = torch.randn(6, 4, 2).permute(0, 2, 1)  # channels are no rows
    stats = ChannelStats(torch.zeros(2, 4), torch.ones(2, 4))
    by_kernels, by_torch = both_ways(lambda: encode(x, get_encoding("int8"), stats))
    assert torch.equal(by_kernels.codes, by_torch.codes)
    codes: npt.NDArray[np.int8] = np.zeros((0, 2, 4), np.int8)
    assert decode(torch.from_numpy(codes), torch.zeros(0, 2), stats).shape == (0, 2, 4)


@pytest.mark.parametrize("layers", [None, [1], [2, 0]])
@pytest.mark.parametrize("encoding", ["int8", "int4", "bfloat16", "float32"])
def test_runs_are_read_and_rows_gathered_as_without_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, layers: list[int] | None
) -> None:
    monkeypatch.setattr(readahead, "_SMALL_EXAMPLE", 0)  # or shards are read as a whole
    monkeypatch.setattr(shard, "_BLOCK_BYTES", 400)  # a few examples of a run at a time
    split = Made([1, 17, 3, 40, 9, 25, 2, 2, 31, 12] * 4, encoding=encoding, top=2).write(tmp_path)

    def drawn() -> list[torch.Tensor]:
        loader = ActivationLoader(split, batch_size=7, layers=layers, shuffle=False)
        streams = (split.tokens(layers, batch_size=50, logits=b, seed=1) for b in (False, True))
        tokens = [batch for stream in streams for batch in stream]
        extra = [batch.logits.topk_logprobs for batch in tokens if batch.logits is not None]
        places = [torch.stack([batch.examples, batch.positions]) for batch in tokens]
        return [*(b.decode() for b in loader), *(b.vectors for b in tokens), *places, *extra]

    by_kernels, by_python = both_ways(drawn)
    assert all(torch.equal(x, y) for x, y in zip(by_kernels, by_python, strict=True))
    monkeypatch.setattr(ShardReader, "_read_blocks", None)  # what kernels have read is right
    monkeypatch.setattr(torch, "index_select", None)
    drawn()


@pytest.mark.parametrize("harm", ["flipped", "cut off"])
def test_what_a_kernel_finds_damaged_is_named(tmp_path: Path, harm: str) -> None:
    assert KERNELS.make()
    split = Made([20] * 12, encoding="int8").write(tmp_path)
    reader = split.open_shard(1)
    path = shard_path(split, "hidden_states", 1)
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    with path.open("r+b") as file:  # the file that is open
        file.write(data) if harm == "flipped" else file.truncate(100)
    codes, scale = split.buffers(reader.tokens, 3)
    message = (
        "example 0 of it, layer 0, does not pass" if harm == "flipped" else "layer 0: the file"
    )
    with pytest.raises(CorruptStoreError, match=f"1e/train shard 1: {message}"):
        reader.read(0, 3, [0, 1, 2], codes, scale)


def test_without_the_functions_of_c_python_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_native", lambda name: importlib.import_module("no_such"))
    kernels = Kernels()
    assert not kernels.make()
    assert kernels.get("read_run", 1 << 40) is None
    assert kernels.get("decode_int8 float32", 1) is not None
