"""Questions as the text side of the store, and back."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from bertvision.pipelines.tasks.squad import Answer, Question


def questions_table(questions: Sequence[Question]) -> pa.Table:
    """Questions as the store's text side; row i is the question that ``question_index`` i names."""
    answers = [[a._asdict() for a in q.answers] for q in questions]
    kind = pa.list_(pa.struct([("text", pa.string()), ("answer_start", pa.int64())]))
    return pa.table(
        {
            "id": [q.id for q in questions],
            "question": [q.question for q in questions],
            "context": [q.context for q in questions],
            "answers": pa.array(answers, kind),
            "is_impossible": [q.is_impossible for q in questions],
        }
    )


def questions_of(table: pa.Table) -> list[Question]:
    """The inverse of `questions_table`."""
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
