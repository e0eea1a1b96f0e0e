"""What a stranger's bytes, or another user of this machine, can reach: nothing that runs code, and nothing of a run's."""

from __future__ import annotations

import ast
import os
import re
import secrets
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from runtime.echo_worker import Echo
from sources import IN_SANDBOXES, dotted, sources

from tidemill.core.errors import ConfigError
from tidemill.ledger import SqliteLedger
from tidemill.run.recipe import load_recipe
from tidemill.run.storage.run_folder import RunFolder
from tidemill.runtime import local, role_host
from tidemill.web_server.http_server import bind

# --- the source: nothing in it turns bytes into code ---------------------------------------------------------------------

MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "shelve",
    "marshal",
    "copyreg",
    "multiprocessing",
}
CALLS = {
    "torch.load",
    "torch.save",
    "torch.hub.load",
    "torch.jit.load",
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
}
CALLS |= {"os.popen", "tempfile.mktemp", "yaml.load", "yaml.full_load", "yaml.unsafe_load", "np.save", "numpy.save"}
METHODS = re.compile(r"(read|to)_pickle|(send|recv)_pyobj|unsafe_load|load_pickle")
ARGUMENTS = {"allow_pickle", "trust_remote_code", "shell", "weights_only"}
SECRETS = re.compile(r"(\._?token|api_key|secret|password)$")


def unsafe(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, n.name) for n in names if _forbidden(n.name))
            case ast.ImportFrom(module=str(module), names=names):
                if _forbidden(module) or any(_forbidden(f"{module}.{n.name}") for n in names):
                    yield node.lineno, module
            case ast.Call(keywords=keywords):
                name = dotted(node)
                if name in CALLS or METHODS.search(name):
                    yield node.lineno, name
                for keyword in keywords:
                    if keyword.arg in ARGUMENTS and ast.unparse(keyword.value) != str(keyword.arg == "weights_only"):
                        yield node.lineno, ast.unparse(keyword)
            case ast.Compare(left=left, ops=ops, comparators=others):
                sides = [dotted(each) for each in (left, *others) if not isinstance(each, ast.Constant)]
                if any(isinstance(op, ast.Eq | ast.NotEq) for op in ops) and any(map(SECRETS.search, sides)):
                    yield node.lineno, f"{ast.unparse(node)}: secrets are compared with compare_digest"


def _forbidden(module: str) -> bool:
    return module.split(".")[0] in MODULES or module.startswith(("torch.multiprocessing", "concurrent.futures.process"))


def test_nothing_makes_code_of_bytes() -> None:
    outside = [(path, text) for path, text in sources() if path not in IN_SANDBOXES]
    found = [f"{path}:{line}: {what}" for path, text in outside for line, what in unsafe(text)]
    assert not found, "use codec, JSON or safetensors\n" + "\n".join(found)


UNSAFE = """
import pickle
from cloudpickle import dumps
import multiprocessing as mp
from multiprocessing.connection import Listener
from torch import multiprocessing
import shelve
state = torch.load(path, weights_only=True)
torch.save(state, path)
array = np.load(path, allow_pickle=True)
frame = pd.read_pickle(path)
value = socket.recv_pyobj()
tree = yaml.load(text, Loader=Loader)
eval(text)
exec(compile(text, "x", "exec"))
subprocess.run(command, shell=True, timeout=5)
model = AutoModel.from_pretrained(name, trust_remote_code=True)
tempfile.mktemp()
if given == self._token: pass
if request.api_key != key: pass
""".strip().split("\n")


@pytest.mark.parametrize("line", UNSAFE)
def test_each_would_be_found(line: str) -> None:
    assert [number for number, _ in unsafe(f"\n{line}\n")][:1] == [2]


def test_what_is_allowed() -> None:
    text = "model.eval()\nre.compile(x)\nnp.load(path)\nif token == 5 or token_id == end: pass\nif key in table: pass\n"
    assert list(unsafe(text)) == []


# --- files and folders ---------------------------------------------------------------------------------------------------


@pytest.fixture
def open_umask() -> Iterator[None]:
    """The least careful of umasks."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("open_umask")
def test_a_run_folder_is_private(tmp_path: Path) -> None:
    config = load_recipe([], [f"run_dir={tmp_path / 'run'}", "model=new:0.1m", "env=guess"])
    folder = RunFolder.open(config)
    assert mode(folder.path) == 0o700  # whatever lies in it is behind this
    with SqliteLedger(folder.path):
        assert mode(folder.path / "ledger.lock") == 0o600
    assert mode(folder.path) == 0o700


@pytest.mark.usefixtures("open_umask")
def test_a_socket_lies_in_no_file_system_or_in_a_private_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / ("long" * 30)):
        root.mkdir(exist_ok=True)
        monkeypatch.setattr("tempfile.tempdir", str(root))
        monkeypatch.setattr(role_host, "_FILELESS", True)
        address, folder = role_host._place()
        assert address.startswith("ipc://@") and not folder and not list(tmp_path.glob("tidemill*"))
        monkeypatch.setattr(role_host, "_FILELESS", False)
        address, folder = role_host._place()
        assert mode(Path(folder)) == 0o700 and len(folder) < 100 and address == f"ipc://{folder}/rpc"
        Path(folder).rmdir()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_the_token_is_where_nobody_else_can_read_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[str] = []
    real = secrets.token_hex

    def noted(size: int) -> str:
        made.append(real(size))
        return made[-1]

    monkeypatch.setattr(secrets, "token_hex", noted)
    worker = Path(__file__).parent / "runtime" / "echo_worker.py"
    placement = local.Local(tmp_path, [sys.executable, str(worker)])
    child = await placement.start(Echo, "echo", "echo", {})
    try:
        assert await child.proxy.pid() == child.pid and len(made[0]) == 64
        for pid in (child.pid, psutil.Process(child.pid).ppid()):  # the role, and the process that it was forked from
            for name in ("cmdline", "environ"):
                assert made[0].encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
        await child.stop()
        await (await placement.start(Echo, "echo", "echo", {})).stop()
    finally:
        await placement.close()
    assert all(made[0] not in path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert made[0] != made[1]


# --- addresses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "0", "::ffff:0.0.0.0", "192.0.2.1", "fe80::1", "224.0.0.1"])
def test_an_address_that_others_can_reach_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--api-key|not an address"):
        bind(host, 0, api_key=None).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "127.9.9.9", "::1"])
def test_loopback_needs_none(host: str) -> None:
    if ":" in host and not _has_ipv6():
        pytest.skip("no IPv6 here")
    bind(host, 0, api_key=None).close()


@pytest.mark.parametrize(
    ("resolved", "refused"), [(["192.0.2.1"], True), (["192.0.2.1", "127.0.0.1"], True), (["127.0.0.1", "192.0.2.1"], False)]
)
def test_a_name_counts_as_what_it_resolves_to(monkeypatch: pytest.MonkeyPatch, resolved: list[str], refused: bool) -> None:
    """What is checked is what is bound: the name is resolved once."""
    asked: list[Any] = []

    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in resolved]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    if refused:
        with pytest.raises(ConfigError, match="--api-key"):
            bind("innocent.example", 0, api_key=None)
    else:
        with bind("innocent.example", 0, api_key=None) as sock:
            assert sock.getsockname()[0] == "127.0.0.1"
    assert len(asked) == 1


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
