"""A label for each word: the forms of its files, metrics by hand, encoder and heads that learn."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from terminal import done, run
from transformers import pipeline

import bertvision
from bertvision.errors import InputError
from bertvision.models.factory import build_head
from bertvision.models.outputs import TokenOutput
from bertvision.models.zoo import HEADS
from bertvision.pipelines.prediction.predictor import load_predictors
from bertvision.pipelines.prediction.source import find_source
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.tagging import (
    TaggedSentence,
    TaggingTask,
    entities,
    surface_f1,
    tag_groups,
)
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.view.head import error_of
from bertvision.pipelines.workspace.workspace import Workspace

CONFIG = TaskConfig(name="tagging", max_length=40)


def read(path: Path, label: str | None = None, *, skip_bad: bool = False) -> list[TaggedSentence]:
    config = CONFIG.model_copy(update={"label": label, "skip_bad": skip_bad})
    return load_task("tagging").read(str(path), "all", config).items


SENTENCES = [
    (("anna", "founded", "the", "firm"), ("B-person", "O", "O", "O")),
    (("#firm", "in", "1901"), ("O", "O", "B-time")),
]
FORMS = {
    "tabs.conll": "anna\tB-person\nfounded\tO\nthe\tO\nfirm\tO\n\n#firm\tO\nin\tO\n1901\tB-time\n",
    "windows.conll": "# id 1\r\nanna B-person\r\nfounded O\r\nthe O\r\nfirm O\r\n \t\r\n"
    "# id 2\r\n#firm O\r\nin O\r\n1901 B-time",
    "columns.txt": "-DOCSTART- -X- O\n\nanna N B-person\nfounded V O\nthe D O\nfirm N O\n\t\n"
    "#firm N O\nin P O\n1901 M B-time\n\n\n",
    "rows.jsonl": "".join(
        json.dumps({"tokens": words, "ner_tags": tags}) + "\n" for words, tags in SENTENCES
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_read_as_the_same_sentences(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FORMS[name].encode())
    items = read(tmp_path / name)
    assert [(item.words, item.tags) for item in items] == SENTENCES
    assert items[0].classes == ("O", "B-person", "B-time")


def test_a_number_sign_in_front_of_a_sentence_is_a_word_if_it_has_a_tag(tmp_path: Path) -> None:
    comments = "# of vitamin O\nanna N O\n\n# O\nin B-x\n\n# B-x\n\n# newdoc\n#\nof O\n"
    (tmp_path / "a.conll").write_text(comments)
    words = [item.words for item in read(tmp_path / "a.conll")]
    assert words == [("anna",), ("#", "in"), ("#",), ("of",)]
    (tmp_path / "b.conll").write_text("# text O\nanna\tB-x\n\n#\tO\n# O\n")
    assert [item.words for item in read(tmp_path / "b.conll")] == [("anna",), ("#", "#")]


def test_columns_are_chosen_by_number_or_name(tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_text("anna NOUN B-person\nran VERB O\n")
    assert read(tmp_path / "a.conll", "2")[0].tags == ("NOUN", "VERB")
    fields = "1\tanna\tanna\tPROPN\tNNP\tNumber=Sing\t2\tnsubj\t_\t_"
    second = "2\tran\trun\tVERB\tVBD\t_\t0\troot\t_\t_"
    (tmp_path / "a.conllu").write_text(
        f"# sent_id = 1\n1-2\tannaran{8 * chr(9)}\n{fields}\n{second}\n"
    )
    assert read(tmp_path / "a.conllu")[0].tags == ("PROPN", "VERB")
    number = fields.replace("anna", "5 000")  # a word of treebanks
    (tmp_path / "b.conllu").write_text(f"{number}\n{second}\n")
    assert read(tmp_path / "b.conllu")[0].words == ("5\xa0000", "ran")
    assert read(tmp_path / "a.conllu", "feats")[0].tags == ("Number=Sing", "_")
    (tmp_path / "a.jsonl").write_text('{"words": ["a"], "pos": ["X"], "id": 7}\n')
    assert read(tmp_path / "a.jsonl", "pos")[0][:3] == ("7", ("a",), ("X",))


@pytest.mark.parametrize(
    ("name", "content", "label", "says"),
    [
        ("a.conll", "anna\n", None, "line 1.*1 field.*give a word and its tag"),
        ("a.conll", "anna O\nran O\n", "3", "line 1.*in column 3"),
        ("a.conll", "anna O\n", "tags", "give a number such as 2"),
        ("a.conllu", "1\tanna\n", None, "line 1.*has 2 fields, a word has 10"),
        ("a.jsonl", '{"tokens": ["a", "b"], "tags": ["X"]}', None, "2 words and 1 tags"),
        ("a.jsonl", '{"tokens": ["a"], "tags": [1]}', None, "the tag 1 must be a name"),
        ("a.jsonl", '{"tokens": ["a b"], "tags": ["X"]}', None, "no white space"),
        ("a.jsonl", '{"tokens": ["a"]}', None, "name the column of the tags with --label"),
        ("a.conll", "\n\n", None, "empty|no sentences"),
    ],
)
def test_malformed_files_are_refused_by_line(
    tmp_path: Path, name: str, content: str, label: str | None, says: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=says):
        read(tmp_path / name, label)


def test_malformed_sentences_are_left_out_where_asked(tmp_path: Path) -> None:
    rows = ['{"tokens": ["a"], "tags": ["X"]}', '{"tokens": ["z"]}', "no JSON"]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    with pytest.raises(InputError, match=r"a\.jsonl, line 2: "):
        read(tmp_path / "a.jsonl")
    assert [item.words for item in read(tmp_path / "a.jsonl", skip_bad=True)] == [("a",)]
    (tmp_path / "a.conll").write_text("anna O\n\nran\n\nfirm B-x\n")
    assert [item.words for item in read(tmp_path / "a.conll", skip_bad=True)] == [
        ("anna",),
        ("firm",),
    ]


# --- metrics ---


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O B-a I-a O", [("a", 1, 2)]),
        ("B-a B-a", [("a", 0, 0), ("a", 1, 1)]),
        ("I-a I-a I-b", [("a", 0, 1), ("b", 2, 2)]),  # IOB1: I- begins where there was another
        ("I-a B-a I-a", [("a", 0, 0), ("a", 1, 2)]),  # and B- parts neighbours of one kind
        ("B-a I-b", [("a", 0, 0), ("b", 1, 1)]),
        ("S-a B-a I-a E-a S-b", [("a", 0, 0), ("a", 1, 3), ("b", 4, 4)]),
        ("O O", []),
    ],
)
def test_entities_are_those_of_conlleval(tags: str, expected: list[tuple[str, int, int]]) -> None:
    assert entities(tags.split()) == expected


TAGS = st.lists(st.sampled_from(["O", "B-a", "I-a", "B-b", "I-b"]), min_size=1, max_size=12)


@given(TAGS)
def test_entities_cover_each_word_inside_once(tags: list[str]) -> None:
    spans = entities(tags)
    covered = [i for _, first, last in spans for i in range(first, last + 1)]
    assert covered == [i for i, tag in enumerate(tags) if tag != "O"]
    assert all(tags[i][2:] == kind for kind, first, last in spans for i in range(first, last + 1))


def test_scores_are_those_by_hand() -> None:
    classes = ("O", "B-a", "I-a")
    items = [
        TaggedSentence("1", ("x", "y", "z"), ("B-a", "I-a", "O"), classes),
        TaggedSentence("2", ("x", "y"), ("B-a", "O"), classes),
    ]
    task = TaggingTask("tagging")
    said = {"1": ["B-a", "O", "O"], "2": ["B-a", "O"]}
    parts = [task.parts(item, " ".join(said[item.id])) for item in items]
    assert parts == [
        {"entity_f1": (0.0, 2.0), "accuracy": (2.0, 3.0)},
        {"entity_f1": (2.0, 2.0), "accuracy": (2.0, 2.0)},
    ]
    # told: x, and x again, which is one surface form; true: "x y" and x
    assert surface_f1(items, said) == pytest.approx(100 * 2 * 1 / (1 + 2))
    assert tag_groups(
        "new  york x", [(0, 3), (5, 9), (10, 11)], ("B-a", "I-a", "O"), (0.5, 1.0, 1.0)
    ) == [{"entity_group": "a", "score": 0.75, "word": "new  york", "start": 0, "end": 9}]


# --- heads ---


@pytest.mark.parametrize("name", [name for name, spec in HEADS.items() if spec.learns("token")])
def test_every_span_head_labels_words(name: str) -> None:
    import torch

    head = build_head(name, layers=3, hidden=64, classes=5, kind="token").eval()
    output = head(torch.zeros(7, 3, 64), torch.tensor([3, 4]))
    assert isinstance(output, TokenOutput)
    assert output.logits.shape == (2, 4, 5)


# --- an encoder and heads on it ---


def write(path: Path, count: int, seed: int) -> str:
    drawn = random.Random(seed)
    kinds = {"anna": "person", "1901": "time"}
    words = ["anna", "was", "born", "in", "1901", "who", "founded", "the", "firm", "."]
    lines = []
    for _ in range(count):
        for word in drawn.choices(words, k=drawn.randint(2, 9)):
            lines.append(f"{word}\tB-{kinds[word]}" if word in kinds else f"{word}\tO")
        lines.append("")
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture(scope="module")
def space(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    folder = tmp_path_factory.mktemp("tagging")
    root = folder / "workspace"
    bertvision.finetune(
        model=str(tiny_bert),
        task="tagging",
        train=write(folder / "train.conll", 60, 1),
        dev=write(folder / "dev.conll", 14, 2),
        epochs=6,
        save_at="6",
        batch_size=4,
        lr=5e-3,
        precision="32",
        workspace=root,
    )
    common = {"precision": "32", "workspace": root}
    bertvision.extract("6e", encoding="float32", **common)
    bertvision.train("adapter-64-shared", checkpoint="6e", epochs=20, lr=1e-2, **common)
    bertvision.evaluate("adapter-64-shared", **common)
    return Workspace.find(root)


def test_encoder_and_head_learn_what_words_say(space: Workspace) -> None:
    rows = {row.name: row for row in bertvision.results(workspace=space.root)}
    for row in rows.values():
        assert row.entity_f1 > 60  # a word says its tag; O everywhere has 0
    compared = bertvision.compare("adapter-64-shared:6e", "bert:6e", workspace=space.root)
    assert compared.metric == "entity_f1"
    assert compared.difference == pytest.approx(
        rows["adapter-64-shared"].entity_f1 - rows["BERT"].entity_f1
    )
    trained = space.head_dir("6e", "adapter-64-shared")
    assert json.loads((trained / "config.json").read_text())["kind"] == "token"
    refused = run("train", "cls-learned-pooling", "-w", space.root)
    assert refused.exit_code == 2
    assert "--kind token" in refused.stderr


def test_stored_tags_are_those_of_first_tokens(space: Workspace) -> None:
    split = space.split("6e", "dev")
    items = TaggingTask("tagging").items_of(split.table())
    assert {item.id for item in items} == {item.id for item in space.items("dev")}
    tags, rows = split.labels["tags"], split.plan.example_id
    for i, row in enumerate(rows):
        item = space.items("dev")[row]
        told = [item.classes[tag] for tag in tags[i] if tag >= 0]
        assert tuple(told) == item.tags  # these words all have tokens


def test_answers_stand_beside_the_gold_tags_and_a_page_shows_the_heads_classes(
    space: Workspace, tmp_path: Path
) -> None:
    rows = bertvision.predictions("adapter-64-shared", workspace=space)
    assert [row.gold for row in rows] == [" ".join(item.tags) for item in space.items("dev")]
    right = np.mean([row.gold == row.answer for row in rows])
    path = tmp_path / "page.html"
    bertvision.view("6e/dev", head="adapter-64-shared", output=path, workspace=space)
    page = path.read_text()
    wrong = round(len(rows) * (1 - right))
    assert f"adapter-64-shared is wrong on {wrong} of {len(rows)}" in page
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    (kept,) = (m for m in data["measures"] if m["over"] == "class")
    assert kept["columns"] == list(space.items("dev")[0].classes)


def test_an_error_on_a_page_has_the_words_whose_tags_differ() -> None:
    item = TaggedSentence("a", ("Anna", "of", "Oslo"), ("B-PER", "O", "B-LOC"), ())
    row = {"gold": "B-PER O B-LOC", "answer": "B-PER B-LOC O"}
    error = error_of(row, item, None)
    assert (error.title, error.gold, error.answer) == (
        "Anna of Oslo",
        "of/O Oslo/B-LOC",
        "of/B-LOC Oslo/O",
    )


def test_texts_are_answered_as_they_were_scored_and_as_the_pipeline_does(
    space: Workspace, tmp_path: Path
) -> None:
    sources = [find_source(name, space) for name in ("bert:6e", "adapter-64-shared:6e")]
    predictors = load_predictors(sources, "32")
    items = space.items("dev")
    places = ("bert/6e", "heads/6e/adapter-64-shared/eval/6e")
    for predictor, place in zip(predictors, places, strict=True):
        expected = json.loads((space.root / place / "predictions.json").read_text())
        rows = predictor.answers(items)
        assert {
            item.id: " ".join(row["tags"]) for item, row in zip(items, rows, strict=True)
        } == expected
    own, theirs = (
        predictors[0],
        pipeline(
            "token-classification",
            model=str(space.snapshot_dir("6e")),
            aggregation_strategy="first",
            device="cpu",
        ),
    )
    for item in items:
        ours, others = own(item.text), theirs(item.text)
        for one, other in zip(ours, others, strict=True):
            assert one["score"] == pytest.approx(float(other["score"]), abs=1e-5)
            assert {**one, "score": 0} == {**other, "score": 0}
    predictors[1].save_pretrained(tmp_path / "saved")
    again = bertvision.Predictor.from_pretrained(tmp_path / "saved", precision="32")
    for one, other in zip(again.answers(items), predictors[1].answers(items), strict=True):
        assert one["tags"] == other["tags"]
        assert one["scores"] == pytest.approx(other["scores"], abs=1e-6)
    text = done("predict", "bert:6e", "--text", "anna was born in 1901", "-w", space.root)
    assert "anna/B-person" in text
    rows = json.loads(
        done(
            "predict",
            "bert:6e",
            "--data",
            space.dataset().source("dev"),
            "-w",
            space.root,
            "--json",
        )
    )
    assert [tuple(row["words"]) for row in rows] == [item.words for item in items]
    scored = done("evaluate", "bert:6e", "--data", space.dataset().source("dev"), "-w", space.root)
    assert "entity F1" in scored
    f1, interval = scored.splitlines()[1].split()[5:7]
    assert np.isfinite(float(f1))
    assert interval.startswith("(")


def test_a_file_of_tags_is_scored_as_conlleval_does(tmp_path: Path) -> None:
    gold, said = tmp_path / "gold.conll", tmp_path / "said.tsv"
    gold.write_text("anna\tB-per\nmay\tI-per\nleft\tO\nrome\tB-loc\n\nrome\tB-loc\n.\tO\n")
    said.write_text(
        "anna\tB-per\tB-per\nmay\tI-per\tO\nleft\tO\tO\nrome\tB-loc\tB-loc\n\n"
        "rome\tB-loc\tB-per\n.\tO\tO\n"
    )
    scores = bertvision.score(said, gold).to_json()
    assert scores["entity_f1"] == pytest.approx(100 / 3)  # one of three on either side
    assert scores["accuracy"] == pytest.approx(100 * 4 / 6)
    assert (scores["total"], scores["words"]) == (2, 6)
    assert bertvision.score(gold, gold).to_json()["entity_f1"] == 100
    said.write_text("anna\tB-per\n")
    with pytest.raises(InputError, match="1 sentence and .* 2 sentences"):
        bertvision.score(said, gold)
    said.write_text("anna\tO\nmay\tO\nleft\tO\n\nrome\tO\n.\tO\n")
    with pytest.raises(InputError, match="word 4 of sentence .* is '', and that of .* 'rome'"):
        bertvision.score(said, gold)
    with pytest.raises(InputError, match="--na-prob"):
        bertvision.score(said, gold, na_prob_thresh=0.5)


def test_words_without_tags_are_enough_to_be_asked(tmp_path: Path) -> None:
    fields = "1\tanna\t_\t_\t_\t_\t_\t_\t_\t_\n2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_\n"
    fields += "".join(f"{i}\t{w}\t_\t_\t_\t_\t_\t_\t_\t_\n" for i, w in ((2, "do"), (3, "n't")))
    for name, text in (
        ("a.conll", "anna\ndo\nn't\n\nrome\n"),
        ("b.conll", "anna\tB-x\ndo\tO\nn't\tO\n\nrome\tno tag\n"),
        ("c.conllu", f"{fields}\n1\trome\t_\t_\t_\t_\t_\t_\t_\t_\n"),
    ):
        (tmp_path / name).write_text(text)
        items = load_task("tagging").read_unlabelled(tmp_path / name, CONFIG)
        assert [item.words for item in items] == [("anna", "do", "n't"), ("rome",)]
    with pytest.raises(InputError, match=r"a\.conll, line 1: has 1 field"):
        read(tmp_path / "a.conll")
