"""I4, checked in the source: what can wait for another process, thread or device has a deadline, or says why it needs none.

A construct that can wait counts as bounded when it is given a timeout, or stands inside `async with asyncio.timeout(...)` or
`asyncio.wait_for(..., seconds)` of the same function. Every other one carries `# bounded: WHY` on one of its lines or as a
comment on the line above: what ends it. On the line that makes a lock the mark covers every `with` of that lock in the file.
Not looked at are calls of functions of ours and what waits for such calls only (`gather`, `TaskGroup`, `await f()`, `async
for` over a generator), for their waits are found where they stand. A method of a proxy has the deadline that `Connection`
gives it (`test_every_call_between_processes_has_a_deadline`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from math import isfinite

import pytest
from sources import IN_SANDBOXES, dotted, sources

from tidemill.run import roles
from tidemill.runtime import rpc

MARK = re.compile(r"#.*\bbounded: \S.{6,}")
MOST = 139  # marks; a rule that is mostly excepted would be none
AWAITED = {"wait", "get", "join", "acquire", "wait_for", "drain", "read", "readline", "readexactly", "readuntil"}
AWAITED |= {"communicate", "wait_closed", "accept", "receive", "shield", "to_thread", "run_in_executor", "open_connection"}
ALWAYS = {
    "communicate",
    "wait",
    "acquire",
    "accept",
    "synchronize",
    "barrier",
    "term",
    "pause",
    "sigwait",
    "wait_for_message",
}
ALWAYS |= {"create_connection", "init_process_group", "urlopen", "waitpid", "waitid", "wait3", "wait4", "connect"}
EMPTY = {"get", "join", "result", "poll", "wait", "shutdown", "select", "exception"}  # called without arguments
RUNS = {"subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output", "subprocess.getoutput"}
HTTP = re.compile(r"(httpx2?|requests)\.(get|post|put|patch|delete|head|options|request|stream|Client|AsyncClient|Session)")
PIPES = re.compile(r"std(in|out|err)|pipe|sock|conn|requests|replies", re.I)
STREAM = re.compile(r"stream|reader|iter_|aiter_|receive|std(in|out|err)", re.I)
LOCKS = re.compile(r"lock|mutex|semaphore|condition|changed|guard", re.I)
LOCK = re.compile(r"(Lock|Condition|Semaphore)$")
TIMED = re.compile(r"monotonic|perf_counter|\btime\(|deadline", re.I)


def problems(text: str) -> list[tuple[int, str]]:
    """(line, construct) of waits that are neither bounded nor marked, and of marks that no wait stands by."""
    lines, tree, found = ["", *text.split("\n")], ast.parse(text), list[tuple[int, str]]()
    marks = {number for number, line in enumerate(lines) if MARK.search(line)}

    def beside(node: ast.stmt | ast.expr) -> set[int]:
        above = {node.lineno - 1} if lines[node.lineno - 1].lstrip().startswith("#") else set[int]()
        return marks & (above | set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))

    locks = {name: beside(made) for name, made in _locks(tree) if beside(made)}
    used = {line for near in locks.values() for line in near}
    for nodes, what in _Waits().of(tree):
        near = {line for node in nodes for line in beside(node)}
        used |= near
        if not near and what.removeprefix("with ") not in locks:
            found.append((nodes[0].lineno, what))
    return sorted([*found, *((line, "a mark without a wait") for line in marks - used)])


def _locks(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Every lock's name, and the statement that makes it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from ((dotted(n), node) for n, value in _pairs(target, node.value) if LOCK.search(dotted(value)))


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
    return list(zip(target.elts, value.elts, strict=True)) if both else [(target, value)]  # type: ignore[attr-defined]


class _Waits(ast.NodeVisitor):
    """Finds what can wait. `_limits`: how many deadlines of this function are around it; `_timed`: names that hold one."""

    def of(self, tree: ast.Module) -> list[tuple[list[ast.expr | ast.stmt], str]]:
        self._found: list[tuple[list[ast.expr | ast.stmt], str]] = []
        self._limits, self._timed, self._async = 0, set[str](), False
        self._awaited, self._started = set[int](), set[int]()
        self._threads = bool(re.search(r"concurrent\.futures|run_coroutine_threadsafe", ast.unparse(tree)))
        self.visit(tree)
        return self._found

    def _add(self, node: ast.expr | ast.stmt, what: str, *also: ast.expr | ast.stmt) -> None:
        """also: where else the mark may stand."""
        if not self._limits:
            self._found.append(([node, *also], what))

    def _function(self, node: ast.AST) -> None:
        outer, self._limits = (self._limits, self._timed, self._async), 0  # a function is called from elsewhere
        self._timed, self._async = set(self._timed), isinstance(node, ast.AsyncFunctionDef)
        self.generic_visit(node)
        self._limits, self._timed, self._async = outer

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._timed |= {dotted(name) for name, value in _pairs(target, node.value) if _is_deadline(value)}
        self.generic_visit(node)

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        """A deadline's context bounds its body; a lock's waits at its header."""
        entered = 0
        for item in node.items:
            context, name = item.context_expr, dotted(item.context_expr)
            self.visit(context)
            if _is_deadline(context) or name in self._timed:
                entered += 1
                self._limits += 1
            elif not isinstance(context, ast.Call) and (isinstance(node, ast.AsyncWith) or LOCKS.search(name)):
                self._add(context, f"with {name}")
            elif isinstance(context, ast.Call) and re.search(r"(Pool|Popen|Pool\w*Executor)$", name):
                self._add(context, f"with {name}(): its end waits")
        for statement in node.body:
            self.visit(statement)
        self._limits -= entered

    visit_With = visit_AsyncWith = _with

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        self._stream(node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        if node.is_async:
            self._stream(node.iter)
        self.generic_visit(node)

    def _stream(self, iterated: ast.expr) -> None:
        if STREAM.search(dotted(iterated).rpartition(".")[2]):
            self._add(iterated, f"async for over {dotted(iterated)}")

    def visit_For(self, node: ast.For) -> None:
        if PIPES.search(dotted(node.iter)) and not isinstance(node.iter, ast.Call):
            self._add(node.iter, f"for line in {dotted(node.iter)}")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        sleeps = [
            n for n in ast.walk(node) if isinstance(n, ast.Call) and dotted(n).endswith(("time.sleep", "asyncio.sleep"))
        ]
        if not TIMED.search(ast.unparse(node.test)):
            for call in sleeps:
                if ast.unparse(call) != "asyncio.sleep(0)":  # a turn for others, not a wait
                    self._add(call, "sleeping until something comes about", node.test)
        self.generic_visit(node)

    def visit_Await(self, node: ast.Await) -> None:
        if isinstance(node.value, ast.Call):
            self._awaited.add(id(node.value))
        else:
            self._add(node, f"await {dotted(node.value)}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = dotted(node)
        last, awaited = name.rpartition(".")[2], id(node) in self._awaited
        if last in ("create_task", "ensure_future"):  # begins something; who waits for it is found elsewhere
            self._started |= {id(argument) for argument in node.args}
        if name == "asyncio.wait_for":
            bounded = _given(node, 1, "timeout")
            if not bounded:
                self._add(node, "asyncio.wait_for without a timeout")
            self._limits += bounded
            self.generic_visit(node)
            self._limits -= bounded
            return
        if id(node) not in self._started and (what := self._waits(node, name, last, awaited)):
            self._add(node, what)
        self.generic_visit(node)

    def _waits(self, node: ast.Call, name: str, last: str, awaited: bool) -> str:
        """What this call waits for; empty when it does not, or is bounded by its own arguments."""
        text = ast.unparse(node)
        timeout = _given(node, None, "timeout")
        if name in ("asyncio.timeout", "asyncio.timeout_at"):
            return "" if _is_deadline(node) else "asyncio.timeout(None)"
        if name == "asyncio.wait":
            return "" if timeout else "asyncio.wait without a timeout"
        if last in ("lockf", "flock"):
            return "" if re.search(r"LOCK_NB|LOCK_UN", text) else f"{last} without LOCK_NB"
        if name in RUNS or HTTP.fullmatch(name):
            return "" if timeout else f"{name} without a timeout"
        if re.fullmatch(r"recv\w*|sendall|sendmsg|send_multipart", last) or (last == "send" and PIPES.search(name)):
            return "" if re.search(r"NOBLOCK|DONTWAIT", text) else f"{last} of a socket"
        if name in ("select.select", "input", "os.read"):
            return "" if len(node.args) == 4 else name
        threads = (self._threads and not self._async) or re.search(r"\.submit\(|run_coroutine_threadsafe\(", text)
        if last in ("result", "exception") and not threads:
            return ""  # asyncio's never waits
        if last == "read" and not awaited and PIPES.search(name.removesuffix("read")):
            return f"{name} of a pipe"
        if last == "readline" and not awaited and PIPES.search(name):
            return f"{name} of a pipe"
        if awaited and last == "put":
            return name if "queue" in name else ""
        if name != "receive" and last == "receive":  # ASGI's is a plain name
            return ""
        if awaited and last in AWAITED:
            return "" if timeout else f"await {name}"
        if last in ALWAYS and isinstance(node.func, ast.Attribute) and not (timeout or (node.args and last == "wait")):
            return "" if re.search(r"WNOHANG|blocking=False|acquire\(False\)", text) else name
        if last == "poll" and re.search(r"proc|child|popen", name):
            return ""  # a look at a process
        if last == "shutdown" and "wait=False" in text:
            return ""
        if last in EMPTY and isinstance(node.func, ast.Attribute) and not timeout:
            return name if not node.args or ast.unparse(node.args[0]) in ("None", "True") else ""
        return ""


def _given(call: ast.Call, position: int | None, keyword: str) -> bool:
    """Whether the call is given that argument, and not as None."""
    values = [k.value for k in call.keywords if k.arg == keyword]
    if position is not None and len(call.args) > position:
        values.append(call.args[position])
    return any(not (isinstance(value, ast.Constant) and value.value is None) for value in values)


def _is_deadline(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call) and dotted(node) in ("asyncio.timeout", "asyncio.timeout_at") and _given(node, 0, "delay")
    )


# --- the package ---------------------------------------------------------------------------------------------------------


def waiting() -> list[tuple[str, str]]:
    """The modules whose waits count: programs in a sandbox are ended at its limits, whatever they wait for."""
    return [(path, text) for path, text in sources() if path not in IN_SANDBOXES]


def test_every_wait_is_bounded() -> None:
    found = [f"{path}:{line}: {what}" for path, text in waiting() for line, what in problems(text)]
    told = "give it a deadline that names its peer (asyncio.timeout, timeout=), or say what ends it: `# bounded: WHY`"
    assert not found, f"{told}\n" + "\n".join(found)


def test_marks_are_the_exception() -> None:
    marks = sum(bool(MARK.search(line)) for _, text in waiting() for line in text.split("\n"))
    assert marks <= MOST, f"{marks} waits without a deadline of their own, at most {MOST}: bound some"


def test_every_call_between_processes_has_a_deadline() -> None:
    seconds = [rpc.DEADLINE_S, roles.START_S, *roles.ENGINE_DEADLINES.values(), *roles.TRAINER_DEADLINES.values()]
    assert all(isfinite(each) and 0 < each <= 3600 for each in seconds)
    with pytest.raises(ValueError, match="more than 0 seconds"):
        rpc.check_deadlines(roles.Engine, {"generate": float("inf")})


@pytest.mark.runs
def test_each_deadline_of_the_package_counts() -> None:
    """Taken away one at a time, every deadline and every mark is missed."""
    ways = {r"(# |; )bounded: .*": "#", r"\btimeout=": "other=", r"asyncio\.timeout\(": "asyncio.timeout(None, "}
    ways |= {r" \| fcntl\.LOCK_NB": "", r"zmq\.NOBLOCK": "0"}
    tried, unnoticed = 0, []
    for path, text in waiting():
        lines = text.split("\n")
        for number, line in enumerate(lines):
            for pattern, less in ways.items():
                if (changed := re.sub(pattern, less, line)) == line or line.lstrip().startswith("def "):
                    continue
                tried += 1
                if not problems("\n".join([*lines[:number], changed, *lines[number + 1 :]])):
                    unnoticed.append(f"{path}:{number + 1}")
    assert tried > 90 and not unnoticed, unnoticed


# --- the test of the test: each of these is found, and each of those is not ----------------------------------------------

FOUND = """
await asyncio.wait({a, b}, return_when=asyncio.FIRST_COMPLETED)
await asyncio.wait({a}, timeout=None)
await asyncio.wait_for(event.wait(), None)
await asyncio.wait_for(event.wait())
async with asyncio.timeout(None): await event.wait()
await event.wait()
await asyncio.shield(task)
await task
await self._task
await queue.get()
await queue.put(1)
await queue.join()
await lock.acquire()
await self._changed.wait_for(ready)
await stream.readexactly(4)
await stream.read()
await reader.readline()
await writer.drain()
await process.wait()
await process.communicate()
await asyncio.to_thread(work)
await loop.run_in_executor(None, work)
await receive()
await socket.recv_multipart(copy=False)
await socket.send_multipart(frames)
await asyncio.open_connection(host, port)
async with self._lock: pass
async with places: pass
async for line in stream: pass
x = [y async for y in stream]
while True: await asyncio.sleep(1)
while not done: time.sleep(0.1)
with self._lock: pass
with lock: pass
with ThreadPoolExecutor(1) as pool: pass
with subprocess.Popen(command) as child: pass
subprocess.run(command, check=True)
subprocess.check_output(command)
process.communicate()
process.wait()
process.wait(timeout=None)
thread.join()
queue.get()
queue.get(True)
lock.acquire()
os.waitpid(pid, 0)
os.read(pipe, 10)
signal.pause()
def g(): return concurrent.futures.ThreadPoolExecutor(1) and future.result()
asyncio.run_coroutine_threadsafe(f(), loop).result()
fcntl.flock(fd, fcntl.LOCK_EX)
fcntl.lockf(fd, fcntl.LOCK_EX)
sock.recv(10)
sock.accept()
sock.connect(address)
sock.sendall(data)
socket.create_connection((host, port))
connection.poll()
select.select([a], [], [])
selector.select()
sqlite3.connect(path)
urllib.request.urlopen(url)
httpx.get(url)
httpx.AsyncClient()
requests.post(url, json=body)
sys.stdin.read()
self._process.stdout.readline()
for line in sys.stdin: pass
context.term()
pool.shutdown()
torch.cuda.synchronize()
torch.distributed.barrier()
torch.distributed.init_process_group("gloo")
x = 1  # bounded: a mark that nothing needs
async with asyncio.timeout(5): call(lambda: event.wait())
await event.wait()  # bounded: so
""".strip().split("\n")

NOT_FOUND = """
await asyncio.wait({a}, timeout=5)
await asyncio.wait_for(event.wait(), seconds)
async with asyncio.timeout(seconds): await event.wait()
limit = asyncio.timeout(5)
await proxy.generate(tokens)
await asyncio.gather(f(), g())
await asyncio.sleep(5)
while time.monotonic() < deadline: time.sleep(0.1)
while True: await asyncio.sleep(0)
async with open_all() as things: pass
task = asyncio.create_task(event.wait())
await self.buffer.put(group)
with open(path) as file: file.read()
table.get(key); ", ".join(names); os.path.join(a, b)
task.result()
self._process.poll()
pool.shutdown(wait=False)
subprocess.run(command, timeout=5)
process.wait(timeout=5)
process.wait(5)
thread.join(5)
lock.acquire(timeout=5)
lock.acquire(blocking=False)
os.waitpid(pid, os.WNOHANG)
fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
await socket.send_multipart(frames, flags=zmq.NOBLOCK)
sqlite3.connect(path, timeout=5)
urllib.request.urlopen(url, timeout=5)
httpx.AsyncClient(timeout=5)
select.select([a], [], [], 5)
await event.wait()  # bounded: its setter ends with the function
""".strip().split("\n")


@pytest.mark.parametrize("line", FOUND)
def test_what_is_found(line: str) -> None:
    assert [number for number, _ in problems(f"async def f():\n    {line}\n")][:1] == [2]


@pytest.mark.parametrize("line", NOT_FOUND)
def test_what_is_not_found(line: str) -> None:
    assert problems(f"async def f():\n    {line}\n") == []


def test_places_of_a_mark() -> None:
    """On any line of the wait, alone on the line above, or where the lock is made; nowhere else, and never for nothing."""
    wait = "async def f():\n    {}\n    await asyncio.wait(\n        {{a}},\n    ){}\n"
    assert problems(wait.format("pass", "")) == [(3, "asyncio.wait without a timeout")]
    assert problems(wait.format("# bounded: a is cancelled above", "")) == []
    assert problems(wait.format("pass", "  # bounded: a is cancelled above")) == []
    assert len(problems(wait.format("x = 1  # bounded: another line's", ""))) == 2
    locks = "lock = asyncio.Lock(){}\nasync def f():\n    async with lock: pass\n"
    assert problems(locks.format("")) == [(3, "with lock")]
    assert problems(locks.format("  # bounded: nothing inside waits")) == []
    named = (
        "async def f():\n  limit = asyncio.timeout(5)\n  async with limit:\n    await event.wait()\n  await event.wait()\n"
    )
    assert problems(named) == [(5, "await event.wait")]
