"""Ways to keep activations and read them in shuffled batches, each used as well as it can be."""

from __future__ import annotations

from importlib.util import find_spec

from peers.base import Reader
from peers.dense import H5Py, MemMap, TensorDictMemMap, ZarrPerExample
from peers.limits import Memcpy, RawRead, SequentialRead
from peers.ours import Bertvision
from peers.ragged import ArrayRecord, Arrow, Lance, LitData, MosaicStreaming, SafeTensors, Zarr

OURS = "bertvision"


def readers(layers: int, hidden: int) -> tuple[list[Reader], list[str]]:
    """All readers whose package is installed, and the packages that are not.

    Args:
        layers: hidden states per token.
        hidden: channels.
    """
    wanted: list[Reader] = [
        Bertvision(layers, hidden),
        RawRead(layers, hidden, threads=1),
        RawRead(layers, hidden, threads=2),
        Memcpy(layers, hidden),
        SequentialRead(layers, hidden),
        H5Py(layers, hidden, workers=0),
        H5Py(layers, hidden, workers=2),
        MemMap(layers, hidden, reuse=False),
        MemMap(layers, hidden, reuse=True),
        TensorDictMemMap(layers, hidden),
        ZarrPerExample(layers, hidden),
        Arrow(layers, hidden, "float16", as_lists=True),
        *(
            kind(layers, hidden, content)
            for content in ("float16", "int8")
            for kind in (SafeTensors, Arrow, LitData, MosaicStreaming, Lance, ArrayRecord)
        ),
        *(
            Zarr(layers, hidden, content, zarrs)
            for content in ("float16", "int8")
            for zarrs in (False, True)
        ),
    ]
    missing = sorted({r.needs for r in wanted if r.needs and find_spec(r.needs) is None})
    return [r for r in wanted if r.needs not in missing], missing
