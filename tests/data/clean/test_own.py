"""Own steps of a recipe."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.formatters.base import BaseFormatter

from bytescale_ext.data.clean.output import gather
from bytescale_ext.data.clean.own import _SAFE, OwnSteps, check_needs_no_trust, check_own_steps
from bytescale_ext.data.clean.recipe import OwnStep, Recipe, Source, read_recipe
from tests.data.cleaning import document, run_recipe, told

CODE = """
from datatrove.pipeline.filters.base_filter import BaseFilter

class HasUrl(BaseFilter):
    name = "has url"

    def __init__(self, start):
        super().__init__()
        self.start = start

    def filter(self, doc):
        doc.metadata["seen"] = True
        return True if doc.metadata["url"].startswith(self.start) else (False, "no_url")
def longer(text, keys, least=3):
    keys["length"] = len(text)
    return len(text) >= least

def louder(text, keys):
    return text.upper()

def wrong(text, keys):
    return 1.5

def failing(text, keys):
    raise KeyError("no such key")

NUMBER = 3
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "steps.py"
    path.write_text(CODE)
    return path


def test_functions_drop_and_change_documents(code: Path) -> None:
    steps = OwnSteps((OwnStep(f"{code}:longer", (("least", 4),)), OwnStep(f"{code}:louder")))
    kept, dropped = document("abcd"), document("abc")
    assert (steps.refusal(kept), kept.text, kept.metadata["keys"]) == (None, "ABCD", {"length": 4})
    assert (steps.refusal(dropped), dropped.text) == (f"{code}:longer: dropped", "abc")


def test_steps_of_datatrove_see_the_keys_of_a_document(code: Path) -> None:
    steps = OwnSteps((OwnStep(f"{code}:HasUrl", (("start", "https://good"),)),))
    good, bad = (document("a", keys={"url": f"https://{name}.org/x"}) for name in ("good", "bad"))
    assert (steps.refusal(good), good.metadata["keys"]["seen"]) == (None, True)
    assert steps.refusal(bad) == f"{code}:HasUrl: no_url"
    masked = document("ask me@corp.net")
    assert OwnSteps((OwnStep("datatrove.pipeline.formatters:PIIFormatter"),)).refusal(masked) is None
    assert "corp" not in masked.text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "AttributeError"),
        ("NUMBER", "cannot be called"),
        ("louder", "unexpected keyword argument 'least'"),
    ],
)
def test_a_step_that_cannot_be_made_is_refused_before_anything_runs(code: Path, name: str, message: str) -> None:
    recipe = Recipe((), own=(OwnStep(f"{code}:{name}", (("least", 1),)),))
    with pytest.raises(ValueError, match=message) as caught:
        check_own_steps(recipe)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "step",
    [
        OwnStep("os:system"),
        OwnStep("steps.py:longer"),
        OwnStep("/tmp/steps.py:longer"),
        OwnStep("datatrove.pipeline.filters.base_filter:BaseFilter.run"),
        OwnStep("datatrove.pipeline.filters:sampler_filter"),
        OwnStep("datatrove.pipeline.filters:none"),
        OwnStep("datatrove.pipeline.writers:JsonlWriter", (("output_folder", "/tmp/x"),)),
        OwnStep("datatrove.pipeline.filters.lambda_filter:os"),
        OwnStep("datatrove.pipeline.filters:UnigramLogProbFilter", (("logprobs_threshold", 0),)),  # downloads a table
        OwnStep("datatrove.pipeline.filters:FastTextClassifierFilter", (("model_url", "https://example.com/m"),)),
        OwnStep("datatrove.pipeline.filters:LanguageFilter"),
        OwnStep("datatrove.pipeline.filters:URLFilter"),
        OwnStep("datatrove.pipeline.filters:C4BadWordsFilter"),
        OwnStep("datatrove.pipeline.filters:LambdaFilter", (("filter_function", "print"),)),
        OwnStep("datatrove.pipeline.filters:RegexFilter", (("regex_exp", "(a+)+$"),)),  # takes 2^n steps
        OwnStep("datatrove.pipeline.filters:GopherQualityFilter", (("exclusion_writer", "/tmp/x"),)),
        OwnStep("classifier", (("model", "x.skops"), ("trusted", ["os.system"]))),
    ],
)
def test_a_recipe_runs_no_code_without_trust(step: OwnStep) -> None:
    with pytest.raises(ValueError, match=f"^step {step.use}: it can run code, download files or run without end, so "):
        check_needs_no_trust(Recipe((), own=(step,)))


def test_safe_steps_exist_and_need_no_trust() -> None:
    for place, names in _SAFE.items():
        steps = tuple(OwnStep(f"{place}:{name}") for name in names)
        check_needs_no_trust(Recipe((), own=(*steps, OwnStep("classifier"))))
        for name in names:
            assert issubclass(getattr(importlib.import_module(place), name), (BaseFilter, BaseFormatter))


@pytest.mark.parametrize(("name", "message"), [("wrong", "not float"), ("failing", "no such key")])
def test_a_step_that_fails_names_the_document(code: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"doc-7: a step of the recipe fails .*{message}"):
        OwnSteps((OwnStep(f"{code}:{name}"),)).refusal(document("a", "doc-7"))


def test_a_recipe_filters_by_keys_and_own_steps_and_keeps_the_keys(code: Path, tmp_path: Path) -> None:
    rows = [
        {"text": "one text", "language": "en", "date": "2024-12-31", "url": "u1"},
        {"text": "two texts", "language": "de", "date": "2021-01-01", "url": "u2"},
        {"text": "three texts", "language": "fr", "date": "2022-01-01"},
        {"text": "four texts", "language": "en", "date": "2025-01-01"},
        {"text": "five texts", "language": "en"},
        {"text": "six", "language": "en", "date": "2020"},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.toml").write_text(
        f"""
        steps = ["exact"]
        [[source]]
        name = "docs"
        path = "{tmp_path / "in.jsonl"}"
        keep = {{ language = ["en", "de"], date = {{ least = "2020", most = "2024" }} }}
        [[step]]
        use = "{code}:longer"
        least = 4
        """
    )
    recipe = read_recipe(tmp_path / "r.toml", [], {})
    run_recipe(recipe, tmp_path / "work")
    (data_set,) = gather(recipe, tmp_path / "work", tmp_path / "out")
    lines = [json.loads(line) for shard in data_set.shards for line in shard.read_text().splitlines()]
    assert [(line["url"], line["language"], line["date"], line["length"]) for line in lines] == [
        ("u1", "en", "2024-12-31", 8),
        ("u2", "de", "2021-01-01", 9),
    ]
    counts = told(tmp_path / "work").counts["docs"]
    assert {what: count for what, count in counts.items() if what.startswith("filter")} == {
        "filter keep: language": 1,
        "filter keep: date": 2,
        f"filter {code}:longer: dropped": 1,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('keep = "en"', "keep: give a table"),
        ("keep = { language = [] }", "keep: language: give a list of values"),
        ("keep = { n = { least = 1, most = 'x' } }", "keep: n: give a list of values"),
        ("keep = { n = { at = 1 } }", "keep: n: give a list of values"),
        ("[[step]]", r"\[\[step\]\]: give use"),
        ("[[step]]\nuse = 'os'", r"\[\[step\]\]: give use"),
    ],
)
def test_bad_conditions_and_steps_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    source = f"[[source]]\nname = 'docs'\npath = '{tmp_path / 'a.txt'}'\n"
    (tmp_path / "r.toml").write_text(source + text)
    with pytest.raises(ValueError, match=message):
        read_recipe(tmp_path / "r.toml", [], {})


def test_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "r.toml").write_text(
        f"[[source]]\nname = 'docs'\npath = '{tmp_path / 'a.txt'}'\nkeep = {{ score = {{ least = 0.5 }} }}\n"
    )
    (source,) = read_recipe(tmp_path / "r.toml", [], {}).sources
    assert isinstance(source, Source)
    (condition,) = source.keep
    met = [condition.is_met({"score": value}) for value in (1, 0.5, 0.4, "0.9", None)]
    assert met == [True, True, False, False, False]
    assert not condition.is_met({})
