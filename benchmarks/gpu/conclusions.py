"""Conclusions from measured rates: shares, and from when on storing pays."""

from __future__ import annotations


def conclusions(
    rate: dict[str, float], bytes_per_example: float
) -> tuple[dict[str, float], list[str]]:
    """Shares, and from when on storing pays, all from measured rates (examples/s)."""
    found = {
        "extraction / forward": rate["extraction"] / rate["forward"],
        "bus, stream / plain copy": rate["stream, codes on the device"]
        * bytes_per_example
        / 1e9
        / rate["copy, GB/s"],
    }
    slowest = min(("forward", "encode", "write"), key=lambda name: rate[name])
    bus = rate["stream, codes on the device"] * bytes_per_example / 1e9
    notes = [
        f"extraction is limited by: {slowest} ({rate[slowest]:.0f} examples/s alone)",
        f"the stream brings {bus:.2f} GB/s of codes to the device",
    ]
    for count in ("one head", "eight heads"):
        again = rate[f"epoch, encoder again, {count}"]
        for where in ("disk", "page cache", "device memory"):
            stored = rate[f"epoch, {where}, {count}"]
            found[f"{where} / encoder again, {count}"] = stored / again
            if stored <= again:
                notes.append(f"{count}, {where}: running the encoder again is faster")
            else:
                epochs = 1 / rate["extraction"] / (1 / again - 1 / stored)
                notes.append(f"{count}, {where}: extraction pays after {epochs:.1f} epochs")
        # reading is hidden behind the steps, so the disk decides only where it is slower than they
        notes.append(
            f"{count}: from a disk below {bytes_per_example * again / 1e9:.2f} GB/s running the "
            "encoder again is faster"
        )
    disk, step = 1 / rate["epoch, disk, one head"], 1 / rate["step alone, one head"]
    if disk > 1 / rate["epoch, encoder again, one head"]:
        heads = (disk - 1 / rate["forward"]) / step
        notes.append(f"disk: storing pays from {heads:.1f} such heads in one pass")
    eight = 8 * rate["epoch, page cache, eight heads"] / rate["epoch, encoder again, one head"]
    found["eight heads in one pass from the page cache / eight runs of the encoder"] = eight
    return found, notes
