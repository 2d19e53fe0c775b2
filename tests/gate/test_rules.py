"""Every rule of the gate finds what it is for, and leaves alone what is right."""

from pathlib import Path
from textwrap import dedent

import pytest

from tools.gate import Source, check
from tools.gate.imports import circles, optional_imports, optional_packages
from tools.gate.words import unique_classes

HERE = "src/headrace/flow/made_up.py"


def found(code: str, path: str = HERE) -> list[str]:
    return [finding.rule for finding in check([Source(path, dedent(code))])]


def function(num_lines: int) -> str:
    return "def f() -> None:\n" + "    print()\n" * (num_lines - 1)


def deep(levels: int) -> str:
    return "def f() -> None:\n" + "".join(f"{'    ' * n}if n:\n" for n in range(1, levels + 1)) + "    " * 20 + "pass\n"


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("x = 1\n" * 601, "file"),
        (function(51), "function"),
        ("def f(a, b, c, d, e, f): ...", "parameters"),
        ("class A:\n    def f(self, a, b, c, d, e, f, *, g): ...", "parameters"),
        (deep(4), "nesting"),
        ("from headrace.learner.base import Learner", "import"),
        ("def f():\n    from headrace import learner", "import"),
        ("from ..learner import base", "import"),
        ("import headrace", "import"),
        ("ROWS = {'plan': 'headrace.wings.plan:plan'}", "import"),
        ("import torch.nn", "import"),
        ("import asyncio\nasyncio.get_running_loop().create_task(f())", "task"),
        ("def f(loop): loop.create_task(f())", "task"),
        ("asyncio.Queue()", "queue"),
        ("asyncio.Queue(maxsize=0)", "queue"),
        ("queue.SimpleQueue()", "queue"),
        ("np.random.default_rng()", "random"),
        ("torch.randn(3)", "random"),
        ("hasattr(x, 'y')", "getattr"),
        ("getattr(x, 'y', None)", "getattr"),
        ("import time\ntime.sleep(1)", "sleep"),
        ("load('x', trust_remote_code=True)", "remote-code"),
        ("load('x', trust_remote_code=flag)", "remote-code"),
        ("load('x', weights_only=False)", "remote-code"),
        ("load('x', allow_pickle=True)", "remote-code"),
        ("run('x', shell=flag)", "remote-code"),
        ("import pickle", "code"),
        ("from joblib import load", "code"),
        ("def f():\n    import marshal", "code"),
        ("import shelve.x", "code"),
        ("eval('1')", "code"),
        ("exec('1')", "code"),
        ("compile('1', 'x', 'exec')", "code"),
        ("import os\nos.system('x')", "code"),
        ("import numpy as np\nnp.load('x')", "code"),
        ("yaml.load(text)", "code"),
        ("async def f():\n    await asyncio.create_subprocess_shell('x')", "code"),
        ("import os  # noqa: F401", "reason"),
        ("class C(Section):\n    lr: float = 0.1", "field"),
        ("@dataclass\nclass C:\n    waited: float", "field"),
        ("class C(msgspec.Struct):\n    step: int | None", "field"),
        ("class P(Protocol):\n    def f(self) -> None: ...", "contract"),
        ("def rewards_of(episodes): ...", "verb"),
        ("class C:\n    @classmethod\n    def of(cls): ...", "verb"),
        ("def f():\n    async def _of(): ...", "verb"),
        ("x = 1  # gate: queue - there is none", "excuse"),
    ],
)
def test_rule_finds_its_offence(code: str, rule: str) -> None:
    assert found(code) == [rule]


@pytest.mark.parametrize(
    "code",
    [
        "x = 1\n" * 600,
        function(50),
        'def f() -> None:\n    """One.\n' + "\n" * 60 + '    """\n',
        "class A:\n    def f(self, a, b, c, d, e): ...",
        "def f(a, b, *, c, d, e, f, g, h, **more): ...",
        deep(3),
        "def f():\n    if a: pass\n" + "".join(f"    elif n == {n}: pass\n" for n in range(9)),
        "from headrace.base.types.batch import Batch",
        "from headrace import __version__",
        "from headrace.flow import state",
        "async def f():\n    async with asyncio.TaskGroup() as group:\n        group.create_task(f())",
        "def f(tasks: asyncio.TaskGroup): tasks.create_task(f())",
        "asyncio.Queue(maxsize=n)",
        "asyncio.Queue(8)",
        "np.random.default_rng(seed)",
        "torch.randn(3, generator=rng)",
        "getattr(x, name)",
        "load('x', trust_remote_code=False)",
        "model.eval()",
        "re.compile('x')",
        "yaml.safe_load(text)",
        "import os  # noqa: F401 - its import has an effect",
        'class C(Section):\n    lr: float = 0.1\n    """Peak."""',
        "@dataclass\nclass C:\n    waited_s: float\n    state: GroupState",
        "class C(Section):\n    weighs: ClassVar[bool] = False",
        'class P(Protocol):\n    def f(self) -> None:\n        """Do f."""',
        "def get_rewards(): ...\ndef proof(): ...\nlengths_of = lengths_by_row",
        "asyncio.Queue()  # gate: queue - one entry for each of a fixed set of keys",
        "# gate: getattr - adapts foreign objects\nhasattr(x, 'y')\nhasattr(x, 'z')",
    ],
)
def test_rule_leaves_alone_what_is_right(code: str) -> None:
    assert found(code) == []


def test_hard_limit_knows_no_excuse() -> None:
    assert found("# gate: file - because\n" + "x = 1\n" * 900) == ["file", "excuse"]
    assert found("# gate: function - because\n" + function(81)) == ["excuse", "function"]


def test_unknown_room_is_found() -> None:
    assert found("x = 1", "src/headrace/utils/misc.py") == ["import"]


def test_verb_may_have_many_flags() -> None:
    assert found("def train(a, b, c, d, e, f): ...", "src/headrace/run/cli/train.py") == []


def test_name_of_a_test_must_be_a_sentence() -> None:
    assert found("def test_queue(): ...", "tests/flow/test_queue.py") == ["sentence"]


@pytest.mark.parametrize("path", ["lab/fuzz/made_up.py", "tools/gate/made_up.py"])
def test_function_of_the_developers_is_named_by_a_verb_too(path: str) -> None:
    assert found("def lengths_of(rows): ...", path) == ["verb"]
    assert found("def lengths_of(rows): ...", "tests/gate/made_up.py") == []


def test_class_needs_a_name_of_its_own_in_the_words_of_the_field() -> None:
    first = Source("src/headrace/flow/a.py", "class Limits: ...\nclass Once: ...")
    again = Source("src/headrace/sync/b.py", "class Limits: ...\nclass _Crew: ...")
    assert [(f.rule, f.path) for f in unique_classes([first, again])] == [("unique", again.path), ("word", again.path)]
    assert unique_classes([first]) == []


def test_modules_that_import_one_another_in_a_circle_are_found(tmp_path: Path) -> None:
    package = tmp_path / "src/headrace/flow"
    package.mkdir(parents=True)
    (package / "a.py").write_text("from headrace.flow.b import x\n")
    (package / "b.py").write_text("x = 1\n")
    assert circles(tmp_path) == []
    (package / "b.py").write_text("TYPE_CHECKING = x = 1\nif TYPE_CHECKING:\n    from headrace.flow.a import y\n")
    (found,) = circles(tmp_path)
    assert (found.rule, found.path) == ("circle", "src/headrace/flow/a.py")
    assert "headrace.flow.a, headrace.flow.b" in found.text


def test_optional_package_is_imported_late_and_in_one_file() -> None:
    packages = optional_packages('[project.optional-dependencies]\nparquet = ["pyarrow>=18"]\ndev = ["ruff"]')
    assert packages == {"pyarrow"}
    late = Source("src/headrace/rollout/environments/a.py", "def f():\n    import pyarrow.parquet")
    again = Source("src/headrace/rollout/environments/b.py", "def f():\n    from pyarrow import parquet")
    early = Source("src/headrace/rollout/environments/a.py", "import pyarrow")
    assert optional_imports([late], packages) == []
    assert [f.path for f in optional_imports([late, again], packages)] == ["src/headrace/rollout/environments/b.py"]
    assert [f.rule for f in optional_imports([early], packages)] == ["optional"]
