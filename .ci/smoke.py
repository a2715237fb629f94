"""Try an installed bertvision where no clone is: ``python smoke.py``, in an empty folder.

It uses what is public alone, needs no network, and takes a minute: the version, a store written and
read, an encoder of two layers fine-tuned and extracted, a head trained and scored, the commands'
help. It ends with an error at the first thing that is not as it should be.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

GOOD, BAD = ["good", "fine", "great"], ["bad", "poor", "awful"]
WORDS = [*GOOD, *BAD, "film", "book", "song", "the", "was", "."]


def main() -> None:
    """Try everything, and say what was tried with which versions."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        require(command("--version").split() == ["bertvision", version("bertvision")], "version")
        write_and_read()
        learn()
        for name in ("finetune", "extract", "train", "evaluate", "probe", "store"):
            require("Usage: bertvision" in command(name, "--help"), f"help of {name}")
    import bertvision

    installed = Path(bertvision.__file__).resolve()
    require(
        Path(sys.prefix).resolve() in installed.parents, f"{installed} is not the installed one"
    )
    names = ("torch", "transformers", "zarr", "numpy", "dask", "datasets", "pytorch-lightning")
    print("smoke test passed:", ", ".join(f"{name} {version(name)}" for name in names))


def command(*words: str) -> str:
    """Output of a command."""
    script = Path(sys.executable).with_name("bertvision")
    done = subprocess.run([script, *words], capture_output=True, text=True)
    require(done.returncode == 0, f"bertvision {' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def require(true: bool, what: str) -> None:
    """End with an error where something is not as it should be."""
    if not true:
        sys.exit(f"failed: {what}")


def write_and_read() -> None:
    """A store of states that any code makes, read whole, streamed and averaged with Dask."""
    import torch

    from bertvision import ActivationLoader, ActivationStore

    states = {f"clip-{i}": torch.randn(5 + i, 3, 16) for i in range(12)}
    store = ActivationStore.create("speech")
    with store.writer("0e", "clips", hidden_size=16, layers=[0, 1, 2]) as writer:
        for key, value in states.items():
            writer.add(key, value)
        split = writer.finish()
    ids = [split.table()["id"][int(i)].as_py() for i in split.plan.example_id]
    read = torch.cat([torch.as_tensor(split[i]).permute(0, 2, 1) for i in range(len(split))])
    truth = torch.cat([states[key] for key in ids])
    error = (read - truth).norm() / truth.norm()
    require(read.shape == truth.shape and error < 0.02, f"values of a store are off by {error:.3f}")
    streamed = sum(len(batch) for batch in ActivationLoader(split, batch_size=4))
    require(streamed == len(states), f"a stream has {streamed} examples")
    mean = torch.as_tensor(split.dask(layers=[-1]).mean(axis=0).compute())
    off = (mean.flatten() - truth[:, -1].mean(0)).abs().max()
    require(bool(off < 0.02), f"a mean over the store is off by {off:.3f}")
    require("clips" in command("store", "ls", "--store", "speech"), "bertvision store ls")
    command("store", "verify", "--store", "speech")


def learn() -> None:
    """The way of every experiment, on an encoder of two layers and a dozen sentences."""
    import bertvision

    tiny_encoder(Path("tiny"))
    for name, nouns in (("train.csv", ["film", "book"]), ("dev.csv", ["song"])):
        texts = [f"the {noun} was {word} ." for noun in nouns for word in GOOD + BAD]
        lines = [f"{text},{int(text.split()[3] in GOOD)}" for text in texts]
        Path(name).write_text("\n".join(["text,label", *lines]) + "\n")
    bertvision.finetune(
        model="tiny",
        task="csv",
        train="train.csv",
        dev="dev.csv",
        precision="32",
        tune_fraction=0.2,
        workspace="space",
    )
    bertvision.extract("1e", workspace="space")
    head = "cls-learned-pooling"
    bertvision.train(head, checkpoint="1e", epochs=2, workspace="space")
    (scored,) = bertvision.evaluate(head, workspace="space")
    require(scored.head == head, "scores of a head")
    require(head in command("status", "--workspace", "space"), "bertvision status")


def tiny_encoder(folder: Path) -> None:
    """A BERT of 2 layers × 32 with random weights, and its tokenizer."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    BertTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    )
    BertModel(config).save_pretrained(folder)


if __name__ == "__main__":
    main()
