"""Files of a repository follow the files that they need."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from bytescale_ext.data.clean.readers import BadRecord, documents_of
from bytescale_ext.data.clean.recipe import files_of, read_recipe, size_of
from bytescale_ext.data.clean.repositories import in_order, joined_files

CASES = {
    "python": (
        {
            "app/main.py": "from app.models import user\nfrom . import views\nimport os, app.tools as tools",
            "app/models/user.py": "from ..base import Base",
            "app/base.py": "import abc",
            "app/views.py": "from app.models.user import (User,\n    Other)",
            "app/tools.py": "",
        },
        [("app/base.py", "app/models/user.py"), ("app/models/user.py", "app/views.py"), ("app/views.py", "app/main.py"),
         ("app/tools.py", "app/main.py")],
    ),
    "c": (
        {"a.c": '#include "lib/z.h"\n#include <stdio.h>', "lib/z.h": '#  include "y.h"', "lib/y.h": "", "y.h": ""},
        [("lib/y.h", "lib/z.h"), ("lib/z.h", "a.c")],
    ),
    "scripts": (
        {"src/a.ts": "import { b } from './z/b'\nconst c = require('../lib')", "src/z/b.tsx": "", "lib/index.js": ""},
        [("src/z/b.tsx", "src/a.ts"), ("lib/index.js", "src/a.ts")],
    ),
    "java": (
        {"src/org/x/A.java": "package org.x;\nimport org.x.z.B;", "src/org/x/z/B.java": "import java.util.List;"},
        [("src/org/x/z/B.java", "src/org/x/A.java")],
    ),
    "rust": ({"src/lib.rs": "pub mod tree;\nmod node;", "src/node.rs": "", "src/tree/mod.rs": "use super::node::N;"},
             [("src/node.rs", "src/tree/mod.rs"), ("src/tree/mod.rs", "src/lib.rs")]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_file_follows_the_files_that_it_needs(name: str) -> None:
    texts, pairs = CASES[name]
    for names in list(permutations(texts))[:24]:
        order = in_order({one: texts[one] for one in names})
        assert sorted(order) == sorted(texts)
        assert all(order.index(first) < order.index(second) for first, second in pairs)
        assert order == in_order(texts)


def test_cycles_and_independent_files_are_in_the_order_of_paths() -> None:
    assert in_order({"b.py": "import a", "a.py": "import b", "d.go": "", "c.go": ""}) == [
        "b.py",
        "a.py",
        "c.go",
        "d.go",
    ]
    assert in_order({}) == []
    chain = {f"m{number}.py": f"import m{number + 1}" for number in range(3000)}
    assert in_order(chain)[0] == "m2999.py"


def test_a_repository_is_a_document(tmp_path: Path) -> None:
    for name, text in {
        "one/b.py": "import z\n", "one/z.py": "Z = 1", "one/.git/c.py": "hidden", "one/read.md": "not code",
        "one/empty.h": " ", "two/a.c": "int x;\n", "none/a.txt": "", ".hidden/a.c": "int",
    }.items():  # fmt: skip
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_text(text)
    (tmp_path / "code" / "two" / "b.c").write_bytes(b"\0")
    (tmp_path / "r.toml").write_text(
        f"[[source]]\nname = 'code'\npath = '{tmp_path / 'code'}'\nformat = 'repositories'"
    )
    recipe = read_recipe(tmp_path / "r.toml", [], {})
    (source,) = recipe.sources
    places = [path for _, path in files_of(recipe.sources)]
    assert [path.name for path in places] == ["none", "one", "two"]
    assert [size_of(path)[0] for path in places] == [0, 9 + 5 + 1, 8]
    none, one, bad, two = (record for path in places for record in documents_of(path, source, "text"))
    assert isinstance(none, BadRecord)
    assert isinstance(bad, BadRecord)
    assert (none.kind, bad.kind) == ("empty", "binary")
    assert not isinstance(one, BadRecord)
    assert (one.id, one.text) == ("code/one", "# z.py\nZ = 1\n\n# b.py\nimport z\n")
    assert not isinstance(two, BadRecord)
    assert two.text == joined_files({"a.c": "int x;"}) == "// a.c\nint x;\n"
