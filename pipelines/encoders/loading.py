"""Finding and loading encoders: hub names and local folders, safetensors only, no foreign code.

Checkpoints as they come: the files that are fetched from the hub, and their configuration.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from bertvision.errors import InputError, counted
from bertvision.models.outputs import without_autocast
from bertvision.pipelines.encoders.checkpoint_path import check_path, require_config
from bertvision.pipelines.encoders.families import position_offset
from bertvision.pipelines.encoders.weights import (
    check_loading,
    files_with,
    has_weights,
    weight_files,
    weight_names,
)
from bertvision.pipelines.files import read_json

VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json")
"""Files that a fast tokenizer is made from, one of which a checkpoint must have."""
_WEIGHTS = ["model.safetensors", "model-*-of-*.safetensors"]
_FILES = [
    *VOCABULARIES,
    "config.json",
    "model.safetensors.index.json",
    "tokenizer_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",  # which tokens end a text
]


_LARGEST = {
    "num_hidden_layers": 1000,
    "hidden_size": 1 << 20,
    "num_attention_heads": 1 << 16,
    "vocab_size": 1 << 26,
}
"""Sizes up to which a configuration is believed: a model is made of it before weights are read."""


def fetch(name: str, revision: str | None, *, weights: bool = True) -> Path:
    """The folder of a checkpoint of the hub, downloaded or in the cache.

    Args:
        name: Name on the hub.
        revision: branch, tag or commit; None is the newest.
        weights: bring them too.

    Raises:
        InputError: there is none, or it cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    check_path(name)
    try:
        wanted = [*_FILES, *(_WEIGHTS if weights else ())]
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except HFValidationError as error:
        raise InputError(f"{name!r} is neither a folder nor a hub name: {error}") from error
    except OSError as error:
        # offline, unknown name or revision, no permission: the hub's errors are all OSErrors
        raise InputError(
            f"{name!r} is no local folder and could not be fetched from the hub "
            f"({type(error).__name__}): check the name and the network, or give a local folder"
        ) from error


def remote_weight_names(folder: Path, name: str) -> list[str]:
    """Names of the tensors of a checkpoint of the hub whose weights were not brought.

    They are in the index of its parts, or in the header of its one file, which is read alone.

    Args:
        folder: As in `fetch`.
        name: Name on the hub.

    Raises:
        InputError: it has no safetensors weights, or they cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError

    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            return list(read_json(index)["weight_map"])
        header = HfApi().parse_safetensors_file_metadata(name, _WEIGHTS[0], revision=folder.name)
    except EntryNotFoundError as error:
        raise InputError(
            f"{name} holds no {_WEIGHTS[0]}: only safetensors weights are read; convert others "
            "with transformers' save_pretrained"
        ) from error
    except Exception as error:  # the hub's, the network's, or of a header that is none
        raise InputError(
            f"what weights {name} has could not be read from the hub ({type(error).__name__}): "
            "check the network, or give a local folder"
        ) from error
    return list(header.tensors)


def read_config(folder: Path, name: str) -> PreTrainedConfig:
    """The configuration of a checkpoint of an encoder of text.

    Args:
        folder: Folder of the checkpoint.
        name: Its name in messages.

    Raises:
        InputError: there is none, it cannot be read without the checkpoint's own code, or it is of
            another kind of model.
    """
    path = require_config(folder, name)
    values = read_json(path)
    if not isinstance(values, dict):
        raise InputError(f"{path} is not a model configuration: it holds no object")
    kind = values.get("model_type")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # each family checks its values in its own way, or trips over them
        raise InputError(
            f"{name} has model_type {kind!r}, which this version of transformers cannot make "
            "without running the checkpoint's own code, and that is never run: take a model of a "
            f"family that it knows, such as bert or roberta ({error})"
        ) from error
    for size in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        value = getattr(config, size, None)  # of an encoder alone, which is asked below
        if value is not None and not (isinstance(value, int) and 0 < value <= _LARGEST[size]):
            raise InputError(
                f"{path} has {size} {value!r}: expected an integer from 1 to {_LARGEST[size]:,}"
            )
    try:
        known = type(config) in AutoModel._model_mapping and config.vocab_size > 0
        layers, width = config.num_hidden_layers, config.hidden_size
    except AttributeError:
        known, layers, width = False, None, None
    if not known or config.is_encoder_decoder or not isinstance(layers, int) or not width:
        raise InputError(
            f"{name} has model_type {kind!r}, which is no single stack of layers over text: take "
            "an encoder such as bert-base-uncased or FacebookAI/roberta-base, or a decoder-only "
            "model such as openai-community/gpt2"
        )
    return config


log = logging.getLogger(__name__)

_IN_LAYER = re.compile(r"(.+?)\.(\d+)\.")
"""Name of a parameter: the list of layers, and the number of one."""


class PretrainedEncoder(NamedTuple):
    """A checkpoint of an encoder on this machine's disk."""

    folder: Path
    """Holds config.json, the weights and the tokenizer."""
    name_or_path: str
    """Hub name, or the absolute path of the folder."""
    revision: str | None
    """Commit on the hub; None for a local folder."""
    config: PreTrainedConfig
    """The model's configuration, of any family that gives hidden states (see docs/encoders.md)."""


def find_pretrained(name_or_path: str, revision: str | None = None) -> PretrainedEncoder:
    """Find a checkpoint: an existing folder, else a name on the hub (downloaded or cached).

    Args:
        name_or_path: local folder or hub name, such as ``FacebookAI/roberta-base``.
        revision: branch, tag or commit on the hub.

    Raises:
        InputError: nothing by that name can be reached, the architecture is no encoder of text
            that transformers knows without the checkpoint's own code, or there are no safetensors
            weights (pickled weights are never read).
    """
    local = Path(name_or_path).expanduser()
    if local.is_dir():
        if revision is not None:
            raise InputError(f"revision {revision!r} makes no sense for the local folder {local}")
        folder, name = local.resolve(), str(local.resolve())
    else:
        folder, name = fetch(name_or_path, revision), name_or_path
        revision = folder.name
    config = read_config(folder, name)
    weight_files(folder)
    return PretrainedEncoder(folder, name, revision, config)


def is_here(name_or_path: str, revision: str | None) -> bool:
    """Whether a checkpoint is on this machine: a folder, or in the cache of the hub.

    Args:
        name_or_path: local folder or hub name.
        revision: branch, tag or commit on the hub.
    """
    from huggingface_hub import try_to_load_from_cache

    if Path(name_or_path).expanduser().is_dir():
        return True
    try:
        cached = try_to_load_from_cache(name_or_path, "config.json", revision=revision)
    except ValueError:  # no name that the hub could have
        return False
    return isinstance(cached, str)


def find_unloaded(name_or_path: str, revision: str | None = None) -> PretrainedEncoder:
    """As `find_pretrained`, for plans: of a name on the hub no weights are downloaded.

    Returns:
        The checkpoint, whose folder may lack the weights (see `checkpoint_weight_names`).

    Raises:
        InputError: as of `find_pretrained`; that there are no weights is found by their names.
    """
    if Path(name_or_path).expanduser().is_dir():
        return find_pretrained(name_or_path, revision)
    folder = fetch(name_or_path, revision, weights=False)
    return PretrainedEncoder(folder, name_or_path, folder.name, read_config(folder, name_or_path))


def checkpoint_weight_names(checkpoint: PretrainedEncoder) -> list[str]:
    """Names of the tensors of a checkpoint, on this machine or on the hub alone.

    Raises:
        InputError: it has no safetensors weights, or the hub cannot be reached.
    """
    if checkpoint.revision is None or has_weights(checkpoint.folder):
        return weight_names(checkpoint.folder)
    return remote_weight_names(checkpoint.folder, checkpoint.name_or_path)


def load_model(folder: Path, model_class: type[Any] = AutoModel, **options: Any) -> PreTrainedModel:
    """Load an encoder, with a task's output layer, in float32, in evaluation mode.

    A task's layers that the checkpoint lacks, and the pooler under them, are made new from torch's
    global generator: seed it. Of an encoder alone a pooler that the checkpoint lacks is left out.

    Args:
        folder: Folder of the checkpoint.
        model_class: ``AutoModel`` for the encoder alone, or an ``AutoModelFor…`` of transformers.
        **options: settings of its configuration beside the checkpoint's own.

    Raises:
        InputError: the weights are damaged, lack a part of the encoder or do not fit the
            configuration, the folder would have other files loaded than its weights, or the family
            has no such output layer.
    """
    return load_reported(folder, model_class, **options)[0]


def load_reported(
    folder: Path, model_class: type[Any], *, resize_output: bool = False, **options: Any
) -> tuple[PreTrainedModel, list[str]]:
    """As `load_model`; also the names of parameters that the checkpoint lacks, made new.

    Args:
        folder: Folder of the checkpoint.
        model_class: As of `load_model`.
        resize_output: Parameters of the output layer that have another shape in the checkpoint are
            made new too; otherwise they are refused.
        **options: As of `load_model`.

    Raises:
        InputError: as of `load_model`.
    """
    check_loading(folder)
    with _transformers_errors(f"the encoder in {folder}"):
        model, report = model_class.from_pretrained(
            folder,
            **options,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused here, by name
        )
    missing = sorted(report["missing_keys"])
    _check_complete(model, missing, folder)
    _say_left_out(model, report["unexpected_keys"], folder)
    _check_shapes(model, report["mismatched_keys"], folder, resize_output=resize_output)
    keep_outputs_in_float32(model)
    model.eval()
    return cast(PreTrainedModel, model), missing


def new_model(
    config: PreTrainedConfig, model_class: type[Any] = AutoModel, *, seed: int, **options: Any
) -> PreTrainedModel:
    """An encoder with random weights, as its own library initialises them: an untrained twin.

    Args:
        config: Configuration of the encoder.
        model_class: As in `load_model`.
        seed: decides all weights; torch's global generator is left as it was.
        **options: settings of its configuration beside ``config``'s own.

    Returns:
        In float32, in evaluation mode, on the CPU.

    Raises:
        InputError: the family has no such output layer.
    """
    config = copy.deepcopy(config)
    for name, value in options.items():
        setattr(config, name, value)
    with (
        _transformers_errors(f"an untrained {config.model_type}"),
        torch.random.fork_rng(devices=[]),
    ):
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
        keep_outputs_in_float32(model)
        model.eval()
    return model


class Dimensions(NamedTuple):
    """Sizes of an encoder."""

    layers: int
    """Transformer layers; there is one hidden state more, the embedding output."""
    hidden_size: int
    max_length: int
    """Most tokens of a window; `sys.maxsize` where nothing limits them."""


def dimensions(config: PreTrainedConfig, tokenizer: Any = None) -> Dimensions:
    """Sizes of an encoder, as its configuration and its architecture have them.

    Args:
        config: Configuration of the encoder.
        tokenizer: Tokenizer of the encoder; where its own limit is lower, that is the longest
            window.
    """
    with _transformers_errors(f"a {config.model_type}"), torch.device("meta"):
        model = AutoModel.from_config(config, trust_remote_code=False)
    positions = getattr(config, "max_position_embeddings", None) or sys.maxsize
    longest = positions - position_offset(model) if positions > 0 else sys.maxsize
    if tokenizer is not None:
        longest = min(longest, tokenizer.model_max_length)
    return Dimensions(config.num_hidden_layers, config.hidden_size, longest)


def embedded_words(model: PreTrainedModel) -> int:
    """Rows of a model's embedding matrix: token ids from there on have no vector."""
    try:
        table: Any = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):  # of a model of characters, such as CANINE
        table = None
    return int(getattr(table, "num_embeddings", None) or model.config.vocab_size)


def check_token_ids(ids: npt.NDArray[np.integer], tokenizer: Any, model: PreTrainedModel) -> None:
    """Refuse tokens that a model has no vector for, before anything is computed.

    Args:
        ids: (tokens,) Token ids of windows.
        tokenizer: Tokenizer that made them.
        model: Model that is to read them.

    Raises:
        InputError: There is one; names it.
    """
    words, largest = embedded_words(model), int(ids.max(initial=0))
    if largest < words:
        return
    count = int((ids >= words).sum())
    raise InputError(
        f"the tokenizer gives the token {tokenizer.convert_ids_to_tokens(largest)!r} the id "
        f"{largest:,}, and the embedding matrix of the {model.config.model_type} model has "
        f"{words:,} rows, ids 0 to {words - 1:,} ({counted(count, 'such token')} in the data): it "
        "was added to the tokenizer alone, or the tokenizer is that of another model; save the "
        "model after model.resize_token_embeddings(len(tokenizer)), or take the tokenizer that it "
        "was trained with"
    )


def takes_token_types(model: PreTrainedModel) -> bool:
    """Whether an encoder is given token types: it has more than one, and an argument for them.

    DistilBERT and ModernBERT have no argument; RoBERTa has a single type; GPT-2 has the argument,
    but reads it as words.
    """
    encoder = model.base_model
    argument = "token_type_ids" in inspect.signature(encoder.forward).parameters
    return argument and getattr(encoder.config, "type_vocab_size", 0) > 1


def pad_id(tokenizer: Any, config: PreTrainedConfig) -> int:
    """Vocabulary index that pads windows: the encoder's own, else the tokenizer's, else 0.

    RoBERTa's kin count positions by it, and the output layers of decoders read the last token that
    is another; to others it makes no difference behind the mask. A tokenizer without one, as many
    decoders have, pads with the token that ends a text.
    """
    of_tokenizer = (getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "eos"))
    for index in (getattr(config, "pad_token_id", None), *of_tokenizer):
        if isinstance(index, int) and index >= 0:
            return index
    return 0


def load_tokenizer(folder: Path) -> Any:
    """Load the fast tokenizer of a checkpoint folder.

    Raises:
        InputError: there is none, or it gives no character offsets.
    """
    # without a vocabulary transformers makes a tokenizer to which every word is unknown
    if not any((folder / name).is_file() for name in VOCABULARIES):
        raise InputError(
            f"{folder} has no {' or '.join(VOCABULARIES)}: take a checkpoint that comes with its "
            "tokenizer, or save one beside it with transformers' save_pretrained"
        )
    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_fast=True
            )
        except (ImportError, OSError, ValueError, KeyError) as error:
            raise InputError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise InputError(f"the tokenizer in {folder} gives no character offsets (not a fast one)")
    return tokenizer


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' load report and progress bars inside the block."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _check_complete(model: Any, missing: Iterable[str], folder: Path) -> None:
    """Refuse an encoder that is random in part; a pooler that nothing trains is left out."""
    alone = model.base_model is model
    prefix = "" if alone else f"{model.base_model_prefix}."
    parameters = {name for name, _ in model.named_parameters()}
    lacking = sorted(n for n in missing if n.startswith(prefix) and n in parameters)
    pooler = [name for name in lacking if name.startswith(f"{prefix}pooler.")]
    if len(lacking) > len(pooler):
        raise InputError(
            f"the weights in {folder} lack {len(lacking) - len(pooler)} of the encoder's, such as "
            f"{next(name for name in lacking if name not in pooler)}: they are not those of its "
            "config.json"
        )
    if pooler and alone:
        model.pooler = None


def _say_left_out(model: PreTrainedModel, unexpected: Iterable[str], folder: Path) -> None:
    """Warn of whole layers among the weights that the configuration does not name."""
    depths: dict[str, int] = {}
    for name, _ in model.base_model.named_parameters():
        if match := _IN_LAYER.match(name):
            depths[match[1]] = max(depths.get(match[1], 0), int(match[2]) + 1)
    for stack, depth in depths.items():
        pattern = re.compile(rf"(?:.+\.)?{re.escape(stack)}\.(\d+)\.")
        numbers = {name: int(m[1]) for name in unexpected if (m := pattern.match(name))}
        beyond = [name for name, number in numbers.items() if number >= depth]
        if beyond:
            log.warning(
                "the weights in %s have %s that its config.json does not name, %d to %d, in "
                "%s: num_hidden_layers is %d, so that they are left out; put the number right "
                "where the whole model is meant",
                *(folder, counted(len({numbers[name] for name in beyond}), "layer")),
                *(min(map(numbers.__getitem__, beyond)), max(map(numbers.__getitem__, beyond))),
                *(", ".join(files_with(folder, beyond)), depth),
            )


def _check_shapes(
    model: Any, mismatched: Iterable[Any], folder: Path, *, resize_output: bool
) -> None:
    """Refuse weights of another shape than the configuration's."""
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    for name, stored, needed in sorted(mismatched):
        if name.startswith(prefix) or not resize_output:
            raise InputError(
                f"the encoder in {folder} cannot be loaded: its weights have {name} of shape "
                f"{tuple(stored)}, and {tuple(needed)} is needed: they are not those of its "
                "config.json, or of another task"
            )


@contextmanager
def _transformers_errors(what: str) -> Iterator[None]:
    """Turn what transformers raises about a model's files into an InputError, quietly."""
    with quiet_transformers():
        try:
            yield
        except Exception as error:
            # what is wrong with a file or a number in it shows anywhere: at a division, in a tensor
            if type(error).__name__ == "SafetensorError":
                raise InputError(f"the weights of {what} are damaged: {error}") from error
            raise InputError(f"{what} cannot be loaded: {error}") from error


class Float32Linear(nn.Linear):
    """A linear layer that mixed precision leaves alone; its weights are as those of its base."""

    def forward(self, features: Tensor) -> Tensor:
        """Logits in float32, (…, outputs), of features (…, width) in any precision."""
        with without_autocast(features):
            return F.linear(features.float(), self.weight, self.bias)


def keep_outputs_in_float32(model: PreTrainedModel) -> None:
    """Make the linear layers above the encoder `Float32Linear`, in place.

    In bfloat16 the best tokens of a window are often equal, and which is answered is then chance.

    Args:
        model: Model with a task's output layer.
    """
    encoder = set(model.base_model.modules())
    for module in model.modules():
        if type(module) is nn.Linear and module not in encoder:
            module.__class__ = Float32Linear  # weights, names and hooks stay
