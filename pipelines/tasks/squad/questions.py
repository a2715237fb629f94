"""What the tasks on SQuAD's data share: questions over contexts, cut into windows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bertvision.errors import InputError
from bertvision.pipelines.tasks.config import TaskConfig
from bertvision.pipelines.tasks.data import TaskData
from bertvision.pipelines.tasks.soundness import Example
from bertvision.pipelines.tasks.source import named_split, on_hub
from bertvision.pipelines.tasks.squad.read import Answer, Question
from bertvision.pipelines.tasks.squad.sources import FORMS, load_squad
from bertvision.pipelines.tasks.squad.windows import question_windows
from bertvision.pipelines.tasks.task import Labels, Task
from bertvision.pipelines.tasks.windows import Windows

SPLITS = ("train", "dev")


class QuestionTask(Task):
    """A task whose items are the `Question` of a file in SQuAD's form, or of the hub."""

    settings: ClassVar[tuple[str, ...]] = (
        "max_length",
        "max_question_length",
        "overlap",
        "answerable_only",
    )
    words = ("contexts", "questions")

    def splits(self, source: str) -> tuple[str, ...]:
        """Train and dev; those of them that a folder holds, or the one that a file is named for.

        Raises:
            InputError: a folder holds several files of a split.
        """
        path = Path(source)
        if path.is_file():
            return (named_split(path),)
        return tuple(split for split in SPLITS if _file(path, split)) or SPLITS

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """Read a SQuAD file, as any split; or the split's of a folder or a data set of the hub.

        Raises:
            InputError: it is missing, malformed, or has no question; or a folder holds several
                files of the split.
        """
        if (path := Path(source)).is_dir() and any(_file(path, each) for each in SPLITS):
            if (file := _file(path, split)) is None:
                raise InputError(
                    f"{source}: holds no {split}*.json, .jsonl or .csv (or the same with .gz) to "
                    f"read {self.name} from"
                )
            source = str(file)
        data = load_squad(source, split, skip_bad=config.skip_bad)
        kept = [q for q in data.questions if not (config.answerable_only and q.is_impossible)]
        return TaskData(kept, data.sha256, data.skipped)

    def group(self, item: Question) -> str:
        """The context: questions on one text are held out together."""
        return item.context

    def example(self, item: Question) -> Example:
        """The question on its context, and whether it is answerable: answers may be worded anew."""
        return (item.question, item.context), not item.is_impossible

    def windows(self, items: Sequence[Question], tokenizer: Any, config: TaskConfig) -> Windows:
        """Windows of the questions, in their order, several of a long context."""
        return question_windows(
            items,
            tokenizer,
            max_length=config.max_length,
            max_question_length=config.max_question_length,
            overlap=config.overlap,
        )

    def table(self, items: Sequence[Question]) -> pa.Table:
        """Questions as the store's text side; row i is what ``question_index`` i names."""
        answers = [[a._asdict() for a in q.answers] for q in items]
        kind = pa.list_(pa.struct([("text", pa.string()), ("answer_start", pa.int64())]))
        return pa.table(
            {
                "id": [q.id for q in items],
                "question": [q.question for q in items],
                "context": [q.context for q in items],
                "answers": pa.array(answers, kind),
                "is_impossible": [q.is_impossible for q in items],
            }
        )

    def items_of(self, table: pa.Table) -> list[Question]:
        """The inverse of `table`."""
        return [
            Question(
                id=row["id"],
                question=row["question"],
                context=row["context"],
                answers=tuple(Answer(**answer) for answer in row["answers"]),
                is_impossible=row["is_impossible"],
            )
            for row in table.to_pylist()
        ]

    def stored(self, windows: Windows) -> Labels:
        """Where the answer is, and whether there is one: what every task on questions learns."""
        return {
            "question_index": windows.item_index,
            **windows.labels,
            "answerable": window_labels(windows),
        }


def _file(folder: Path, split: str) -> Path | None:
    """The file of a split in a folder; None without one, and in a folder of Parquet files."""
    if not folder.is_dir() or on_hub(str(folder)):
        return None
    ends = [f"{form}{end}" for form in FORMS for end in ("", ".gz")]
    found = sorted(p for end in ends for p in folder.glob(f"{split}*{end}"))
    later = [path for path in found if "-v1.1" not in path.name]
    if len(found) < 2 or len(later) == 1:
        return next(iter(later or found), None)
    raise InputError(
        f"{folder}: holds {' and '.join(path.name for path in found)}, each of which may be "
        f"{split}: give the files with --train and --dev, or leave one in the folder"
    )


def window_labels(windows: Windows) -> npt.NDArray[np.int8]:
    """1 for each window that wholly holds the first gold answer, else 0: (windows,).

    An answer never begins at token 0, the [CLS], which is where windows without one point.
    """
    return (windows.labels["start_positions"] > 0).astype(np.int8)
