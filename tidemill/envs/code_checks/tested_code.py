"""Programs of a check by tests: one has the tested code, the other the tests, each in a sandbox of its own."""

import ast
import builtins
import collections
import importlib
import json
import os
import sys
import types
import typing

from tidemill.envs.code_checks.remote_objects import Peer, PeerGone

OWN_NAMES = {name: getattr(module, name) for module in (typing, collections) for name in module.__all__}


def serve_code(source):
    """Run the tested code, and answer the other side's calls."""
    peer, module = Peer(guarded=False), types.ModuleType("solution")
    sys.modules["solution"] = module
    assert peer.give(lambda names: {name: vars(module)[name] for name in names if name in vars(module)}) == 0
    exec(compile(source, "solution.py", "exec"), module.__dict__)
    try:
        peer.serve()
    except PeerGone:
        os._exit(0)


def run_tests(tests, entry_point):
    """Run each of the tests, and print which have passed."""
    report = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what tests print is no verdict
    peer, verdicts = Peer(guarded=True), []
    for text in tests:
        verdicts.append(_verdict(peer, text, entry_point))
    os.write(report, json.dumps(verdicts).encode())
    os._exit(0)


def _verdict(peer, text, entry_point):
    """ "" for a test that passes, else the reason why it does not."""
    if peer.gone:
        return "the tested code had ended"
    try:
        module = types.ModuleType("tests")
        sys.modules["tests"] = module
        module.__dict__.update(names_of(peer, text, entry_point))
        exec(compile(text, "tests.py", "exec"), module.__dict__)
        if entry_point and "check" in vars(module):  # as HumanEval's rows have it
            vars(module)["check"](vars(module)[entry_point])
    except PeerGone:
        return "the tested code ended"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "the tested code ended" if peer.gone else ""


def names_of(peer, text, entry_point):
    """Names that the tests use and do not define: modules of their own, the rest from the tested code.

    A name of Python's own never comes from the tested code, which could judge itself by it; but for the entry point.
    """
    tree = ast.parse(text)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    plain = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - _only_with_attributes(tree)
    own = {name: OWN_NAMES[name] for name in used if name in OWN_NAMES and name != entry_point}
    for name in used & set(sys.stdlib_module_names) - plain - {entry_point}:
        own[name] = importlib.import_module(name)
    wanted = {entry_point} if entry_point else {name for name in used if name not in own and not hasattr(builtins, name)}
    found = peer.ask("call", 0, sorted(wanted))
    sys.modules["solution"] = _solution(peer)
    return {**{name: value for name, value in found.items() if name in wanted}, **own}


def _only_with_attributes(tree):
    """Names that are only used as in `name.attribute`."""
    before = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    behind = [node.id for node in before if isinstance(node, ast.Name)]
    every = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return {name for name in behind if behind.count(name) == every.count(name)}


def _solution(peer):
    """A module `solution`, for tests that import from it."""

    class Solution(types.ModuleType):
        def __getattr__(self, name):
            found = peer.ask("call", 0, [name])
            if name not in found or name.startswith("__"):
                raise AttributeError(name)
            return found[name]

    return Solution("solution")
