"""Runs the commands of a page of results at about a tenth of their size, to see that all still run.

Usage: python docs/reproduce.py PAGE OUT [NAME=PATH ...], such as
``python docs/reproduce.py results-glue /tmp/glue mpnet=encoders/all-mpnet-base-v2 data=data``

The scripts of the page run in ``OUT`` from copies of docs/, so that what they collect replaces
nothing here, on a tenth of the data, with a ``bertvision`` that makes a tenth of the training
examples and steps that it is asked for; scores say nothing. ``data`` holds ``squad``, ``glue``,
``sts``, ``wikiqa``, ``senteval_probing``, ``senteval_downstream``, ``wnut17``, ``ud_english_ewt``;
``mpnet`` and ``minilm`` are encoders, ``gemma`` a decoder, ``rxnfp`` and ``smiles`` what
reactions.sh takes. The same command continues a run.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PART, FEWEST = 10, 50
"""One of so many examples and steps is left, but so many at least."""
BLOCK = 100
"""Lines, or sentences of CoNLL columns, that stay together: questions have several lines."""
COUNTS = ("--train-questions", "--steps")
"""Options of bertvision whose number is a size."""
_GLUE = {"mrpc": "MRPC", "stsb": "STS-B", "cola": "CoLA 4000", "sst2": "SST-2 4000"}
_SQUAD_V1 = "patterns/run.sh {mpnet} {data}/squad squad_v1 1"
PAGES = {
    "results": [
        "squad11/run.sh {mpnet} {data}/squad",
        "squad2/run.sh squad11/snapshots/1e {data}/squad",
        "squad2_small/run.sh {mpnet} {data}/squad",
        "squad11_seeds/run.sh {minilm} {data}/squad",
        _SQUAD_V1,
        "int4.sh {mpnet.name}-squad_v1-0",
        "convolutions.sh {mpnet.name}-squad_v1-0",
        "transform.sh minilm-ewt {minilm} {data}/ud_english_ewt/train.conllu.gz "
        "{data}/ud_english_ewt/dev.conllu.gz",
    ],
    "results-decoder": ["decoder/run.sh {gemma} {data}"],
    "results-glue": [f"glue.sh {t} {{mpnet}} {{data}}/glue/{rest}" for t, rest in _GLUE.items()],
    "results-layers": [
        _SQUAD_V1,
        _SQUAD_V1.replace("mpnet", "minilm"),
        "patterns/run.sh {mpnet} {data}/glue/MRPC mrpc 3",
        "patterns/run.sh {minilm} {data}/glue/MRPC mrpc 3",
        "reactions.sh {rxnfp} {smiles}",
    ],
    "results-sentences": [
        _SQUAD_V1,
        "sentences.sh {mpnet.name}-squad_v1-0 {data}",
        "wikiqa.sh {mpnet} {data}/wikiqa",
    ],
    "results-variants": [
        "variants.sh mrpc {minilm} {data}/glue/MRPC",
        "variants.sh stsb {minilm} {data}/glue/STS-B",
        "variants.sh cola {minilm} {data}/glue/CoLA",
        "parsing.sh {minilm} {data}/ud_english_ewt",
        "compression.sh {minilm} {data}/glue/MRPC",
    ],
}
"""Scripts of docs/results/ with their arguments by page; each finds what those before it made."""


def main(page: str, out: Path, given: dict[str, Path]) -> None:
    """Run all scripts of a page in a folder, with paths by the names that their arguments have."""
    if page not in PAGES:
        raise SystemExit(f"no page {page!r} has scripts: choose one of {', '.join(PAGES)}")
    names = set(re.findall(r"{(\w+)", " ".join(PAGES[page])))
    if missing := sorted(name for name in names if name not in given or not given[name].exists()):
        raise SystemExit(f"{page} needs {' and '.join(f'{name}=PATH' for name in missing)}")
    out.mkdir(parents=True, exist_ok=True)
    paths = {name: path.resolve() for name, path in given.items()}
    if "data" in names:
        paths["data"] = out.resolve() / "data"
        for source in sorted(p for p in given["data"].rglob("*") if p.is_file()):
            cut(source, paths["data"] / source.relative_to(given["data"]))
        if not (out / "treebank").exists():
            (out / "treebank").symlink_to(paths["data"] / "ud_english_ewt")
    shutil.copytree(DOCS, out / "docs", dirs_exist_ok=True)
    (out / "bin").mkdir(exist_ok=True)
    tool = out / "bin" / "bertvision"
    own = shlex.join([sys.executable, str(DOCS / "reproduce.py"), "bertvision"])
    tool.write_text(f'#!/bin/sh\nexec {own} "$@"\n')
    tool.chmod(0o755)
    places = [str(tool.parent.resolve()), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(places)}
    for line in PAGES[page]:
        script, *arguments = (word.format(**paths) for word in line.split())
        begin = time.monotonic()
        command = ["bash", str(out.resolve() / "docs" / "results" / script), *arguments]
        if subprocess.run(command, cwd=out, env=environment).returncode:
            raise SystemExit(f"failed: {shlex.join(command)}, in {out}")
        print(f"{line}: {time.monotonic() - begin:.0f} s", file=sys.stderr)


def scaled(arguments: list[str]) -> list[str]:
    """Arguments of bertvision with a tenth of each of `COUNTS`."""
    left = list(arguments)
    for i, word in enumerate(arguments[1:], 1):
        if arguments[i - 1] in COUNTS:
            left[i] = str(max(int(word) // PART, min(int(word), FEWEST)))
    return left


def cut(source: Path, target: Path) -> None:
    """Copy a tenth of a file: articles in SQuAD's JSON, sentences of CoNLL columns, or lines.

    Of files with the same lines, such as those of WikiQA, the same are left.
    """
    if target.exists():
        return
    opened = partial(
        gzip.open if source.suffix == ".gz" else open,
        encoding="utf-8",
        errors="surrogateescape",  # so that bytes that are no UTF-8 stay what they are
        newline="",
    )
    with opened(source, mode="rt") as file:
        text = file.read()
    name = source.name.removesuffix(".gz")
    if name.endswith(".json"):
        content = json.loads(text)
        text = json.dumps({**content, "data": content["data"][::PART]})
    else:
        end = "\n\n" if ".conll" in name else "\n"
        units = text.removesuffix(end).split(end)
        left = [unit for i, unit in enumerate(units) if i // BLOCK % PART == 0]
        text = end.join(left) + end
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}")
    with opened(new, mode="wt") as file:
        file.write(text)
    new.rename(target)


if __name__ == "__main__":
    if sys.argv[1:2] == ["bertvision"]:
        from bertvision.__main__ import main as bertvision

        sys.argv[1:] = scaled(sys.argv[2:])
        bertvision()
        sys.exit()
    if len(sys.argv) < 3 or not all("=" in word for word in sys.argv[3:]):
        raise SystemExit(__doc__)
    pairs = (word.partition("=") for word in sys.argv[3:])
    main(sys.argv[1], Path(sys.argv[2]), {name: Path(path) for name, _, path in pairs})
