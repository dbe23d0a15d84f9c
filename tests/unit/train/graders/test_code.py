"""What is told of a python grader's code before anything runs it."""

from __future__ import annotations

import pytest

from train.graders import sandbox
from train.graders.code import LOADED, PACKAGES, named, why_refused
from train.graders.sandbox import run_python

GRADE = "def grade(sample, item):\n    return 1.0\n"


@pytest.mark.parametrize(
    "source",
    [
        GRADE,
        "def grade(sample, item, k=1): return k",
        "def grade(*given): return 1",
        "def grade(sample, /, item): return 1",
        "grade = lambda sample, item: 1",
        "def score(sample, item): return 1\ngrade = score",
        "from operator import itemgetter as grade",
        "from operator import *",
        "class Grader:\n    def __call__(self, sample, item): return 1\ngrade = Grader()",
        "import functools\n@functools.partial(map, 1)\ndef grade(sample): return 1",
        "if True:\n    def grade(sample, item): return 1",
        "def grade(sample, item):\n    def inner(): yield 1\n    return sum(inner())",
        "def grade(sample): return 1\ndef grade(sample, item): return 1",
        f"import os.path, json\nfrom collections import abc\n{GRADE}",
        f"try:\n    import rdkit\nexcept ImportError:\n    rdkit = None\n{GRADE}",
        f"try:\n    from rdkit import Chem\nexcept (ValueError, ModuleNotFoundError):\n    pass\n{GRADE}",
        # What is not there is not imported.
        f"try:\n    from rapidfuzz import fuzz\nexcept ImportError:\n    from fuzzywuzzy import fuzz\n{GRADE}",
        f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rdkit.Chem import Mol\n{GRADE}",
        f"import sys\nif sys.version_info >= (3, 11):\n    import tomllib\nelse:\n    import tomli_w\n{GRADE}",
        f"{GRADE}\nif __name__ == '__main__':\n    import rdkit",
        f"import contextlib\nwith contextlib.suppress(ImportError):\n    import rdkit\n{GRADE}",
        "grade=lambda sample, item: 1",
        "from typing import Callable\ngrade: Callable[..., float] = lambda sample, item: 1",
        "grade, most = (lambda sample, item: 1), 2",
        "(grade := lambda sample, item: 1)",
        "for grade in [lambda sample, item: 1]: pass",
        # Which of two it is only shows when it runs, as does what is made by other ways.
        "try:\n    import json\n    def grade(sample, item): return 1\nexcept ImportError:\n    grade = None",
        "grade = None\ndef make():\n    global grade\n    grade = lambda sample, item: 1\nmake()",
        "globals()['grade'] = lambda sample, item: 1",
        "exec('def grade(sample, item): return 1')",
        "def score(sample, item): return 1\ngrade = score\ndef score(text): return 2",
    ],
)
def test_what_can_run_is_taken(source: str) -> None:
    assert why_refused(source) == ""


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def grade(sample, item) return 1", "is not Python: expected ':' (line 1)"),
        ("x = '\0'", "is not Python: source code string cannot contain null bytes"),
        (
            f"import rdkit\n{GRADE}",
            "imports 'rdkit' (line 1), which is not there; beside Python's own modules",
        ),
        (f"import json\nfrom skbio.sequence import DNA\n{GRADE}", "imports 'skbio' (line 2)"),
        ("def grade(sample, item):\n    import nothing_here as n\n    return 1", "imports 'nothing_here' (line 2)"),
        (f"from . import helpers\n{GRADE}", "imports '.' (line 1)"),
        (f"import appliance.store\n{GRADE}", "imports 'appliance' (line 1)"),
        (f"try:\n    import rdkit\nexcept ValueError:\n    pass\n{GRADE}", "imports 'rdkit' (line 2)"),
        (f"try:\n    import skbio\nexcept ImportError:\n    import rdkit\n{GRADE}", "imports 'rdkit' (line 4)"),
        (f"with open('x'):\n    import rdkit\n{GRADE}", "imports 'rdkit' (line 2)"),
        ("", "defines no function `grade(sample, item)`"),
        ("def score(sample, item): return 1", "defines no function `grade(sample, item)`"),
        ("class A:\n    def grade(self, sample, item): return 1", "defines no function `grade(sample, item)`"),
        ("def a():\n    def grade(sample, item): return 1", "defines no function `grade(sample, item)`"),
        ("# def grade(sample, item)", "defines no function `grade(sample, item)`"),
        ("grade = 1", "defines `grade` as int (line 1); expected a function"),
        ("grade = 0x1" + "0" * 5000, "defines `grade` as int (line 1); expected a function"),
        ("if True:\n    grade = None", "defines `grade` as NoneType (line 2); expected a function"),
        ("from typing import Callable\ngrade: Callable", "defines no function `grade(sample, item)`"),
        ("grade = grades = None", "defines `grade` as NoneType"),
        (
            f"def grade(a, b, c, d={'1+' * 400}1, *e, f, **g): return 1",
            "defines `grade(a, b, c, d, *e, f, **g)` (line 1)",
        ),
        ("def grade(sample): return 1", "defines `grade(sample)` (line 1); it is called as `grade(sample, item)`"),
        ("def grade(): return 1", "defines `grade()` (line 1)"),
        ("def grade(a, b, c): return 1", "defines `grade(a, b, c)` (line 1)"),
        ("def grade(sample, *, item): return 1", "defines `grade(sample, *, item)` (line 1)"),
        ("grade = lambda sample: 1", "defines `grade(sample)` (line 1)"),
        ("def score(sample): return 1\ngrade = score", "defines `grade(sample)` (line 1)"),
        ("def grade(sample, item): return 1\ndef grade(sample): return 1", "defines `grade(sample)` (line 2)"),
        ("async def grade(sample, item): return 1", "defines `grade` as `async def` (line 1)"),
        ("def grade(sample, item): yield 1", "has a `yield` in `grade` (line 1)"),
    ],
)
def test_what_cannot_is_refused_in_words(source: str, why: str) -> None:
    assert why_refused(source).startswith(why)


def test_what_python_warns_of_is_not_written_into_the_log_of_the_box(recwarn: pytest.WarningsRecorder) -> None:
    assert why_refused(f"x = '\\d' is 1\n{GRADE}") == "" and not recwarn.list


def test_every_package_that_the_documentation_names_is_imported_and_computes_where_code_runs() -> None:
    """By names as OpenAI's documentation has them, in forks of a process that has loaded none of them."""
    if why := sandbox.refusal():
        pytest.skip(why)
    uses = {
        "numpy": "import numpy as np\nx = np.arange(3).sum() == 3",
        "scipy": "from scipy import stats\nx = stats.spearmanr([1, 2, 3], [1, 2, 3]).statistic > 0.99",
        "sympy": "import sympy\nx = sympy.simplify('x + x') == sympy.sympify('2*x')",
        "pandas": "import pandas as pd\nx = pd.DataFrame({'a': [1, 2]}).a.sum() == 3",
        "rapidfuzz": "from rapidfuzz import fuzz\nx = fuzz.ratio('a', 'a') == 100",
        "sklearn": "from sklearn.metrics import f1_score\nx = f1_score([0, 1], [0, 1]) == 1",
        "rouge_score": "from rouge_score import rouge_scorer\n"
        "x = rouge_scorer.RougeScorer(['rougeL'], use_stemmer=True).score('a cat', 'a cat')['rougeL'].fmeasure == 1",
        "deepdiff": "from deepdiff import DeepDiff\nx = not DeepDiff({'a': 1}, {'a': 1})",
        "jsonschema": "import jsonschema\njsonschema.validate({}, {'type': 'object'})\nx = True",
        "pydantic": "from pydantic import BaseModel\nclass A(BaseModel):\n    a: int\nx = A(a='1').a == 1",
        "yaml": "import yaml\nx = yaml.safe_load('a: 1') == {'a': 1}",
        "nltk": "from nltk.translate import bleu_score as b\nx = b.sentence_bleu([list('abcd')], list('abcd')) == 1",
        "sqlparse": "import sqlparse\nx = len(sqlparse.parse('select 1')) == 1",
        "ast_grep_py": "from ast_grep_py import SgRoot\n"
        "x = SgRoot('a = 1', 'python').root().find(pattern='a = $A') is not None",
    }
    assert list(uses) == PACKAGES and set(LOADED) <= set(PACKAGES)
    for name, code in uses.items():
        source = f"{code}\ndef grade(sample, item):\n    return bool(x)\n"
        assert why_refused(source) == "" and named(source) == {name} & set(LOADED)
        assert run_python(source, {}, None) == 1.0, name
