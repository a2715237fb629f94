"""``--task chat``: conversations through a chat template, and a mask of what is learned."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attacks import reseal
from byhand import fields, rewrite
from families import make_family
from transformers import AutoTokenizer

import bertvision
from bertvision.errors import InputError, ProvenanceError, WorkspaceError
from bertvision.pipelines.tasks.chat import conversation, to_be_answered
from bertvision.pipelines.tasks.data import TaskConfig
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


WORD_MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '\n' }}"
    "{% endgeneration %}{% else %}{{ 'in ' + m.content + '\n' }}{% endif %}{% endfor %}"
)
"""A marked span ends in white space, which a tokenizer of words has no token for."""


@pytest.mark.parametrize(
    ("template", "turns", "words"),
    [
        (WORD_MARKED, TURNS, "anna in 1901"),
        (WORD_MARKED, [*TURNS, {"role": "user", "content": "who?"}], "anna in 1901"),
        (WORD_MARKED, TURNS[1:3], "anna"),  # begins with what the assistant says
        (WORD_MARKED, [TURNS[0], {"role": "assistant", "content": " "}, TURNS[2]], ""),
        (
            "{% macro said(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
            "{% for m in messages %}{% if m.role == 'assistant' %}{{ said(m) }}\n{% else %}"
            "{{ m.content }}\n{% endif %}{% endfor %}",
            TURNS,
            "anna in 1901",
        ),
        (
            "  {%- for m in messages %}\n{%- if m.role == 'assistant' -%}\n  {%- generation -%} "
            "{{ m.content }}\n{% endgeneration %}\n{% else %}{{ m.content }}\n{% endif %}"
            "{% endfor %}",
            TURNS,
            "anna in 1901",
        ),
    ],
)
def test_what_a_template_marks_is_learned_and_nothing_else(
    template: str, turns: Any, words: str, tmp_path: Path
) -> None:
    """Characters of the text decide, whether or not the tokenizer keeps white space."""
    for name in ("bert", "gpt2"):
        tokenizer = AutoTokenizer.from_pretrained(make_family(name, tmp_path / name))
        tokenizer.chat_template = template
        tokens = conversation(turns, tokenizer)
        plain = tokenizer.apply_chat_template(turns, return_dict=False)
        assert tokens.ids.tolist() == plain
        said = tokenizer.decode(tokens.ids[tokens.loss_mask == 1])
        assert "".join(said.replace("##", "").split()) == words.replace(" ", "")


def test_a_template_that_changes_what_it_marked_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% macro said(m) %}{% generation %} {{ m.content }} {% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ said(m) | trim }}{% else %}"
        "{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(InputError, match="changes what stands between {% generation %} and"):
        conversation(TURNS, tokenizer)


DATED = "{{ strftime_now('%d %b %Y') }}. " + MARKED


@pytest.mark.parametrize("format", ["%d %b %Y", "%-d/%m/%y 100%% %H:%M:%S", "%A %j %%d %e"])
def test_a_template_is_told_the_date_that_it_is_given(tokenizer: Any, format: str) -> None:
    tokenizer.chat_template = (
        "{%- if strftime_now is defined %}{%- set now = strftime_now(f) %}{%- endif %}{{ now }}"
    ).replace("(f)", f"({format!r})")
    noon = datetime.datetime(2024, 7, 6, 12)
    told = tokenizer.decode(to_be_answered(TURNS[:1], tokenizer, "2024-07-06"))
    assert told == noon.strftime(format)
    now = tokenizer.decode(to_be_answered(TURNS[:1], tokenizer))
    assert now[:2] == datetime.datetime.now().strftime(format)[:2]


@pytest.fixture
def dated(decoder: Path, tmp_path: Path) -> dict[str, Any]:
    """A decoder whose template writes the date, and conversations of several shards."""
    model = shutil.copytree(decoder, tmp_path / "dated")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = DATED
    tokenizer.save_pretrained(model)
    rows = [{"id": f"t{i}", "messages": TURNS[:2]} for i in range(40)]
    data = write_lines(tmp_path / "talks.jsonl", *rows)
    return {"model": model, "task": "chat", "data": data, "workspace": tmp_path / "space"}


def dates_in(store: Path, name: str, model: Path) -> set[str]:
    split = bertvision.ActivationStore.open(store)[name]
    tokenizer, ids, plan = (
        AutoTokenizer.from_pretrained(model),
        split.array("input_ids"),
        split.plan,
    )
    spans = zip(plan.first_token, plan.n_tokens, strict=True)
    return {tokenizer.decode(ids[a : a + n]).partition(".")[0] for a, n in spans}


def test_the_date_of_a_template_is_kept_with_the_data(dated: dict[str, Any]) -> None:
    """It is today's where none is given, and whoever reads the data again is told the same."""
    store = dated["workspace"] / "activations"
    bertvision.extract("0e", date="2024-07-26", **dated)
    assert dates_in(store, "0e/talks-all", dated["model"]) == {"26 Jul 2024"}
    bertvision.extract("untrained", task="talks", workspace=dated["workspace"])
    assert dates_in(store, "untrained/talks-all", dated["model"]) == {"26 Jul 2024"}
    split = bertvision.ActivationStore.open(store)["0e/talks-all"]
    assert split.record.provenance["date"] == "2024-07-26"
    with pytest.raises(WorkspaceError, match="was added with date = '2024-07-26', now"):
        bertvision.extract("0e", date="2024-07-27", **dated)
    other = dated | {"workspace": dated["workspace"].with_name("other")}
    bertvision.extract("0e", **other)
    today = datetime.date.today().strftime("%d %b %Y")
    assert dates_in(other["workspace"] / "activations", "0e/talks-all", dated["model"]) == {today}


@pytest.mark.parametrize(
    ("task", "date", "message"),
    [
        ("chat", "26.7.2024", "--date '26.7.2024': write year, month and day as 2024-07-26"),
        ("text", "2024-07-26", "--date 2024-07-26: is told to a chat template, --task chat"),
    ],
)
def test_a_date_that_is_none_or_that_nothing_reads_is_refused(
    dated: dict[str, Any], task: str, date: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        bertvision.extract("0e", date=date, **dated | {"task": task})


@pytest.mark.parametrize(
    ("pool", "digest"),
    [(None, True), (None, False), ("mean", True)],  # of a pooling the digest alone is stored
)
def test_a_split_is_not_gone_on_with_in_other_tokens(
    dated: dict[str, Any], pool: str | None, digest: bool
) -> None:
    """The stored tokens are compared where a split was begun before digests were kept."""
    options = {} if pool is None else {"pool": pool}
    bertvision.extract("0e", date="2024-07-26", **dated, **options)
    space = dated["workspace"]
    name = "talks-all" + (f"-{pool}" if pool else "")
    record = space / "activations" / "ledger" / "0e" / name / "split.json"
    # as if the data had been read on another day, before dates were kept
    stored = fields(record)
    del stored["provenance"]["date"]
    if not digest:
        del stored["provenance"]["token_ids_sha256"]
    reseal(record, stored)
    data = fields(space / "datasets" / "talks.json")
    data["task"]["date"] = None
    rewrite(space / "datasets" / "talks.json", data)
    message = (
        "token_ids_sha256" if digest else "the data make other input_ids now than 0e/talks-all"
    )
    with pytest.raises(ProvenanceError, match=message):
        bertvision.extract("0e", task="talks", workspace=space, **options)


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
        ({"messages": ["x"]}, "message 0: is JSON, but no object with role, content"),
        ({"messages": [{"role": "user"}]}, r"message 0: has the fields \['role'\], .*'content'"),
        ({"messages": TURNS[:1]}, "has no message of the role 'assistant'"),
        ({"prompt": "x"}, r"has the fields \['prompt'\], but not \['completion'\]"),
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
