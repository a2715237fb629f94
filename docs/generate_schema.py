"""Write the JSON schema of ``bertvision.yaml`` into docs/reference: ``make docs``.

It is made of the classes that read the file, with the texts that stand under their fields. A test
keeps it current.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.workspace.config import (
    DataConfig,
    FinetuneConfig,
    ModelConfig,
    WorkspaceConfig,
)

TARGET = Path(__file__).parent / "reference" / "bertvision.schema.json"
SECTIONS = (ModelConfig, TaskConfig, DataConfig, FinetuneConfig)


def field_texts(section: type[BaseModel]) -> dict[str, str]:
    """The text under each field of a class, by the field's name, in one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            value = text.value if isinstance(text, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[field.target.id] = " ".join(value.value.split())
    return found


def described(schema: dict[str, Any], section: type[BaseModel]) -> None:
    """Give the properties of a class's schema their texts."""
    for name, text in field_texts(section).items():
        schema["properties"][name]["description"] = text


def schema() -> dict[str, Any]:
    """The schema of the whole file."""
    made = WorkspaceConfig.model_json_schema()
    described(made, WorkspaceConfig)
    for section in SECTIONS:
        described(made["$defs"][section.__name__], section)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def render() -> str:
    """The file's text."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render())
