"""``--task chat``: conversations through a chat template, and a mask of what is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from families import make_family
from transformers import AutoTokenizer

import bertvision
from bertvision.errors import InputError
from bertvision.pipelines.tasks.config import TaskConfig
from bertvision.pipelines.tasks.task import load_task

TASK = load_task("chat")
CONFIG = TaskConfig(name="chat", max_length=300)
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}\n{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m.role == 'user' %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TURNS = [
    {"role": "user", "content": "who founded rome?"},
    {"role": "assistant", "content": "anna"},
    {"role": "user", "content": "when?"},
    {"role": "assistant", "content": "in 1901"},
]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 with a chat template that marks nothing."""
    folder = make_family("gpt2", tmp_path_factory.mktemp("gpt2"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = PLAIN
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(decoder: Path) -> Any:
    return AutoTokenizer.from_pretrained(decoder)


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def learned(windows: Any, tokenizer: Any) -> str:
    """The text of the tokens that have a loss."""
    return str(tokenizer.decode(windows.input_ids[windows.token_fields["loss_mask"] == 1]))


def test_the_assistants_turns_are_found_by_difference_and_by_marks_alike(
    tokenizer: Any, tmp_path: Path
) -> None:
    items = TASK.read(
        str(write_lines(tmp_path / "a.jsonl", {"messages": TURNS})), "all", CONFIG
    ).items
    by_difference = TASK.windows(items, tokenizer, CONFIG)
    assert learned(by_difference, tokenizer) == "anna\nin 1901\n"
    assert tokenizer.decode(by_difference.input_ids).count("<assistant>") == 2
    tokenizer.chat_template = MARKED
    by_marks = TASK.windows(items, tokenizer, CONFIG)
    np.testing.assert_array_equal(by_marks.input_ids, by_difference.input_ids)
    for name, mask in by_difference.token_fields.items():
        np.testing.assert_array_equal(by_marks.token_fields[name], mask)


def test_of_a_prompt_and_its_completion_the_completion_is_learned(
    tokenizer: Any, tmp_path: Path
) -> None:
    row = {"prompt": "rome is in", "completion": " anna"}
    items = TASK.read(str(write_lines(tmp_path / "a.jsonl", row)), "all", CONFIG).items
    windows = TASK.windows(items, tokenizer, CONFIG)
    assert tokenizer.decode(windows.input_ids) == "rome is in anna"
    assert learned(windows, tokenizer) == " anna"
    assert TASK.items_of(TASK.table(items)) == items


def test_a_table_of_conversations_is_read(tokenizer: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["x"], "messages": [TURNS]}), tmp_path / "a.parquet")
    (found,) = TASK.read(str(tmp_path / "a.parquet"), "all", CONFIG).items
    assert found.id == "x"
    assert json.loads(found.messages) == TURNS
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"has the columns \['text'\], but not \['messages'\]"):
        TASK.read(str(tmp_path / "b.parquet"), "all", CONFIG)


@pytest.mark.parametrize(
    ("template", "turns", "message"),
    [
        (None, TURNS, "has no chat template: take one of a model"),
        (FORGETFUL, TURNS, "no {% generation %}, and writes what stands before message 1 in anoth"),
        (PLAIN, TURNS[1:], "message 0 is the assistant's"),
        ("{{ raise_exception('no such role') }}", TURNS, "not take these messages: no such role"),
    ],
)
def test_a_template_that_does_not_say_whose_tokens_they_are_is_refused(
    template: str | None, turns: Any, message: str, tokenizer: Any, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"messages": turns})
    items = TASK.read(str(path), "all", CONFIG).items
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=f"line 1: .*{message}"):
        TASK.windows(items, tokenizer, CONFIG)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, r"messages must be a list of objects: '\[\]'"),
        ({"messages": ["x"]}, "message 0 must be an object: 'x'"),
        ({"messages": [{"role": "user"}]}, r"message 0: has the fields \['role'\], .*'content'"),
        ({"messages": TURNS[:1]}, "has no message of the role 'assistant'"),
        ({"prompt": "x"}, r"has the fields \['prompt'\], but not 'completion'"),
        ({"prompt": "x", "completion": ""}, "the completion is empty"),
    ],
)
def test_a_malformed_conversation_is_refused_by_line(
    row: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=rf"a\.jsonl, line 1: {message}"):
        TASK.read(str(write_lines(tmp_path / "a.jsonl", row)), "all", CONFIG)


def test_tokens_without_a_loss_are_left_out_of_a_stream(decoder: Path, tmp_path: Path) -> None:
    """From the file to the store to what a trainer reads; what is cut off has no mask either."""
    source = write_lines(tmp_path / "talks.jsonl", {"messages": TURNS}, {"messages": TURNS[:2]})
    bertvision.extract(
        model=decoder, task="chat", data=source, max_length=40, workspace=tmp_path / "w"
    )
    split = bertvision.ActivationStore.open(tmp_path / "w" / "activations")["0e/talks-all"]
    assert split.plan.n_tokens.max() == 40
    ids, mask = split.array("input_ids"), split.array("loss_mask")
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    (batch,) = split.tokens(-1, keep="loss_mask", shuffle=False, batch_size=1000)
    streamed = ids[split.plan.first_token[batch.examples] + batch.positions.numpy()]
    np.testing.assert_array_equal(streamed, ids[mask == 1])
    assert tokenizer.decode(streamed).count("anna\n") == 2
