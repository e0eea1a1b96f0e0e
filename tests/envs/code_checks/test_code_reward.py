"""The reward `code`: right programs pass, and programs that cheat, crash or hang do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidemill.core.errors import ConfigError, SandboxFailed
from tidemill.core.types import InfraError, Score, Task, Unscorable
from tidemill.envs.code_checks import code_settings
from tidemill.envs.environment_settings import RowsSettings
from tidemill.envs.judge import RewardJudge
from tidemill.envs.reward_workers.reward_pool import RewardPool
from tidemill.envs.rewards import code
from tidemill.envs.rewards.code import program_in, score
from tidemill.envs.task_files import rows

try:
    LEVEL = code_settings.working_level(code_settings.settings_of({}))
except ConfigError as why:
    pytest.skip(str(why), allow_module_level=True)

SQUARE = [{"stdin": "3\n", "stdout": "9"}, {"stdin": "4", "stdout": "16\n"}]


PATIENT = {"seconds": 120.0, "warm": 0}  # right programs pass on a machine that has much else to do


def value(program: str, **checks: Any) -> float:
    sandbox = {**PATIENT, **checks.pop("sandbox", {})}
    outcome = score(f"I think:\n```python\n{program}\n```\n", sandbox=sandbox, budget_s=600.0, **checks)
    assert isinstance(outcome, Score), outcome
    return outcome.value


def test_cases_compare_what_was_printed() -> None:
    assert value("print(int(input()) ** 2)", cases=SQUARE) == 1.0
    assert value("print(str(int(input()) ** 2) + '  \\n')", cases=SQUARE) == 1.0, "spaces at the end do not matter"
    for wrong in (
        "print(9)",
        "print(int(input()) ** 2); raise SystemExit(1)",
        "print(int(input()) ** 2); 1 / 0",
        "import os; os._exit(0)",
        "print(' 9')",
        "",
    ):
        assert value(wrong, cases=SQUARE) == 0.0, wrong
    assert value("print(9)", cases=SQUARE, partial=True) == 0.5


TESTS = "assert f(2) == 4\nassert [f(x) for x in (1, 3)] == [1, 9]"
CHEATS = {
    "ends early": "import os; os._exit(0)",
    "ends when it is called": "import os\ndef f(x): os._exit(0)",
    "ends by an exception": "def f(x): raise SystemExit(0)",
    "prints a verdict": "print('[\"\", \"\"]')\nimport os, sys\nsys.stdout.flush()\nos._exit(0)",
    "writes to every descriptor": "import os\nfor n in range(64):\n  try: os.write(n, b'[\"\"]')\n"
    "  except OSError: pass\nos._exit(0)",
    "equals everything": "class A:\n  def __eq__(s, o): return True\n  def __hash__(s): return 0\ndef f(x): return A()",
    "changes the built-ins": "import builtins\nbuiltins.all = builtins.any = lambda *a: True\n"
    "class AssertionError(Exception): pass",
    "is a dictionary of everything": "class F(dict):\n  def __missing__(s, k): return 4\nf = F().__getitem__",
    "looks for the tests": "import gc\ndef f(x):\n"
    "  return eval(next(o for o in map(str, gc.get_objects()) if 'assert f' in o))",
    "sends a reply that cannot be read": "import os\ndef f(x): os.write(3, b'\\xff' * 64)",
    "replies before it is asked": "import os, json, struct\nt = json.dumps({'value': {'dict': []}}).encode()\n"
    "os.write(3, (struct.pack('<I', len(t)) + t) * 9)\ndef f(x): return 4",
    "floods": "while True: print('x' * 1000)",
    "is late": "def f(x):\n  while True: pass",
}  # fmt: skip


@pytest.mark.parametrize("how", CHEATS)
def test_a_program_that_cheats_has_failed(how: str) -> None:
    sandbox = {"cpu_seconds": 1, "output_kb": 16}
    assert value(CHEATS[how], tests=TESTS, sandbox=sandbox) == 0.0


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def f(x): return x * x", TESTS),
        ("def f(x): raise ValueError('no')",
         "try:\n    f(1)\n    raise AssertionError\nexcept ValueError as e:\n    assert str(e) == 'no'"),
        ("def f(a): a.sort()", "a = [3, 1]\nassert f(a) is None and a == [1, 3]"),
        ("def f(d): d['x'] = {1, 2}", "d = {}\nf(d)\nassert d == {'x': {1, 2}}"),
        ("def f(g, n): return g(n) + 1", "assert f(lambda x: x * 2, 4) == 9"),
        ("def f(n):\n    for i in range(n): yield i", "assert list(f(4)) == [0, 1, 2, 3]"),
        ("import math\ndef f(x): return math.sqrt(x)", "assert math.isclose(f(2), 1.4142, rel_tol=1e-3)"),
        ("def f(): return (1, 2.5, 'x', b'y', None, {3: [4]}, {5}, 10**30, 1j, True, float('inf'))",
         "assert f() == (1, 2.5, 'x', b'y', None, {3: [4]}, {5}, 10**30, 1j, True, float('inf'))"),
        ("from fractions import Fraction as F\nfrom decimal import Decimal as D\nimport datetime as d\n"
         "def f(): return F(1, 3), D('0.1'), d.date(2020, 2, 3), range(3)",
         "import datetime, decimal, fractions\n"
         "assert f() == (fractions.Fraction(1, 3), decimal.Decimal('0.1'), datetime.date(2020, 2, 3), range(3))"),
        ("class S:\n    def __init__(s): s.a = []\n    def push(s, x): s.a.append(x)\n    def pop(s): return s.a.pop()\n"
         "    def __len__(s): return len(s.a)",
         "s = S()\ns.push((1, {2: 3}))\nassert len(s) == 1 and isinstance(s, S) and s.pop() == (1, {2: 3}) and s.a == []"),
        ("class V:\n    def __init__(s, x): s.x = x\n    def __add__(s, o): return V(s.x + o.x)\n"
         "    def __mul__(s, k): return V(s.x * k)\n"
         "    def __eq__(s, o): return s.x == o.x",
         "assert V(1) + V(2) == V(3) and V(2) * 3 == V(6) and V(1) != V(2)"),
        ("def f(node): return node.value + (f(node.next) if node.next else 0)",
         "class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\n"
         "assert f(Node(1, Node(2))) == 3"),
        ("def f(x): return x", "from solution import f as g\nassert g(3) == 3"),
        ("import sys\nsys.setrecursionlimit(5000)\n"
         "def f(n): return 0 if n == 0 else 1 + f(n - 1)", "assert f(2000) == 2000"),
        ("print('noise')\ndef f(x):\n    print('more')\n    return x", "print('from the tests')\nassert f(1) == 1"),
    ],
)  # fmt: skip
def test_right_programs_pass(program: str, tests: str) -> None:
    assert value(program, tests=tests) == 1.0


def test_names_of_python_never_come_from_the_program() -> None:
    assert value("def abs(x): return 0\ndef f(x): return 9", tests="assert abs(f(2) - 4) < 1e-6") == 0.0
    assert (
        value(
            "class M:\n    def isclose(*a): return True\nmath = M()\ndef f(x): return 7",
            tests="assert math.isclose(f(2), 4)",
        )
        == 0.0
    )
    assert (
        value(
            "class Counter:\n    def __eq__(s, o): return True\n    def __init__(s, x): 0\ndef f(x): return x",
            tests="assert Counter(f('ab')) == Counter('cd')",
        )
        == 0.0
    )
    assert value("def sum(x): return 6", tests="assert sum([9]) == 6", entry_point="sum") == 1.0
    assert (
        value("class V:\n    def __sub__(s, o): return 0\ndef f(x): return V()", tests="assert abs(f(2) - 4) < 1e-6") == 0.0
    )


def test_exceptions_of_the_program_end_no_loop_of_the_tests() -> None:
    loop = "for a, b in zip(map(f, [1, 2]), [1, 4]):\n    assert a == b"
    assert value("def f(x): raise StopIteration", tests=loop) == 0.0
    swallowed = "try:\n    f(1)\nexcept Exception:\n    pass"
    assert value("def f(x): raise KeyError(x)", tests=swallowed) == 1.0
    assert value("import os\ndef f(x): os._exit(0)", tests=swallowed) == 0.0


def test_the_tests_own_objects_can_not_be_used_to_read_them() -> None:
    """By a function of the tests one could reach their variables."""
    program = "def f(g):\n    return g.__globals__['EXPECTED']\n"
    assert value(program, tests="EXPECTED = 41\ndef g(): pass\nassert f(g) == EXPECTED") == 0.0
    program = "def f(node):\n    return node.__class__.__init__.__globals__['EXPECTED']\n"
    tests = "EXPECTED = 41\nclass Node:\n    def __init__(self): self.a = 1\nassert f(Node()) == EXPECTED"
    assert value(program, tests=tests) == 0.0
    assert value("def f(node): return node.a", tests=tests.replace("EXPECTED = 41", "EXPECTED = 1")) == 1.0


def test_each_of_several_tests_counts() -> None:
    tests = ["assert f(1) == 1", "assert f(2) == 4", "def check(c):\n    assert c(3) == 9"]
    assert value("def f(x): return 1", tests=tests[:2], partial=True) == 0.5
    assert value("def f(x): return x * x", tests=tests, entry_point="f") == 1.0
    assert value("def f(x): return 2 ** (x - 1) if x != 2 else 4", tests=tests, entry_point="f") == 0.0


def test_the_last_block_is_the_program() -> None:
    assert program_in("a\n```python\n1\n```\nb\n```\n2\n3\n```\nc") == "2\n3\n"
    assert program_in("```py\nx = '''\ncut off") == "x = '''\ncut off"
    assert program_in("print(1)") == "print(1)"
    assert program_in("``` \n```") == ""


def test_no_checks_are_no_score_and_a_fault_of_the_sandbox_is_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(score("print(1)"), Unscorable)

    def fails(*args: object) -> None:
        raise SandboxFailed("the sandbox is gone")

    monkeypatch.setattr(code, "kept_sandboxes", lambda: type("Kept", (), {"use": fails}))
    assert score("print(1)", cases=SQUARE) == InfraError("the sandbox is gone")


# --- in a recipe ---------------------------------------------------------------------------------------------------------


def test_the_level_is_known_before_a_run_and_options_are_checked() -> None:
    pool = RewardPool(workers=1, limit_s=10.0)
    judge = RewardJudge("code", pool)
    assert judge.sandbox == LEVEL
    assert RewardJudge("code", pool, {"sandbox": "limits"}).sandbox == "limits"
    for options, said in (
        ({"sandbox": {"seconds": 8.5}}, "scoring.limit_s is 10: raise it"),
        ({"sandbox": {"level": "best"}}, "level 'best'"),
        ({"sandbox": 3}, "reward_options.sandbox = 3"),
        ({"depth": 3}, "no option 'depth'"),
    ):
        with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
            RewardJudge("code", pool, options)


@pytest.mark.parametrize(
    ("data", "said"),
    [({}, "neither `tests` nor `cases`"), ({"tests": []}, "tests of task"), ({"cases": [{"stdin": "1"}]}, "cases of task")],
)
def test_rows_are_checked(data: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        code_settings.check_rows([Task("t", "p", data)])


async def test_workers_judge_and_keep_their_sandbox(tmp_path: Path) -> None:
    lines = [{"prompt": f"square {n}", "answer": "print(int(input()) ** 2)", "cases": SQUARE} for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pool = RewardPool(workers=1, limit_s=600.0)
    try:
        environment = rows(RowsSettings(data=str(tmp_path / "rows.jsonl"), reward="code"), pool)
        assert environment.sandbox == LEVEL
        task = environment.tasks("train")[0]
        reference = "tidemill.envs.rewards.code:score"
        given = {"cases": SQUARE, "sandbox": {"level": LEVEL, **PATIENT}, "budget_s": 600.0}
        for completion, wanted in (("print(int(input()) ** 2)", 1.0), ("1 / 0", 0.0), (str(environment.gold(task)), 1.0)):
            outcome = await pool.call(reference, kwargs={"completion": completion, **given})
            assert outcome == Score(wanted)
        assert pool.counters()["scoring/starts"] == 1, "a sandbox that waits is no process left behind"
    finally:
        await pool.close()
