"""Start of a sandboxed program: the forked child of the supervisor confines itself and becomes the program.

Like `supervisor` it runs without this package, and imports nothing of it.
"""

import _sitebuiltins
import builtins
import ctypes
import os
import resource
import signal
import struct
import sys

DEATH_SIGNAL, DUMPABLE, NO_NEW_PRIVILEGES, SECCOMP = 1, 4, 38, 22
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
CONFINED = b"confined"  # what a program's start tells the supervisor, if it does not tell why it failed
MOST_SAID = 300  # bytes of that
CHANNEL = 3  # descriptor of the connection to another sandbox
LIBC = ctypes.CDLL(None, use_errno=True)


def become(settings, request, files, folder, ends, link) -> None:
    """Become the program, confined. Never returns. link: a connection to the supervisor, which hears whether it is."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, end in enumerate(ends):
        os.dup2(end, target)
    error = confined(settings, files, folder, link)
    try:
        if error:
            raise error
        if settings["channel"]:
            os.dup2(settings["channel"], CHANNEL)
        os.closerange(CHANNEL + bool(settings["channel"]), 65536)
        environment = {**request["env"], "HOME": folder, "TMPDIR": folder}
        if request["argv"]:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which this interpreter ignores
                signal.signal(number, signal.SIG_DFL)
            limit(settings["limits"])
            os.execvpe(request["argv"][0], request["argv"], environment)
        os.environ.clear()
        os.environ.update(environment)
        limit(settings["limits"])
        code = source_run(request["python"], request["paths"], request["args"])
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        code = 126
    os._exit(code)


def confined(settings, files, folder, link):
    """Confine this process to a folder with these files, and tell the supervisor. Returns the error of a file, if any.

    A process that cannot be confined ends.
    """
    try:
        os.setsid()
        rules = opened(settings["landlock"], folder) if settings["landlock"] else None
        os.chdir(folder)
        own(settings["user"], folder)
        error = given(files)
        confine(settings, rules, link)
        return error
    except BaseException as error:
        link.send(f"{type(error).__name__}: {error}".encode(errors="replace")[:MOST_SAID])
        os._exit(126)


def own(user, folder) -> None:
    """Be the user that the program has, if it has one of its own."""
    if user:
        os.chown(folder, user, user)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def given(files):
    """Write the request's files. Returns the error of one that cannot be: it is the program's."""
    try:
        for name, content in files.items():
            os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
            with open(name, "wb") as file:
                file.write(content)
    except (OSError, ValueError) as error:
        return error


def opened(landlock, folder):
    """A Landlock ruleset's descriptor."""
    handled = struct.pack(f"<{len(landlock['handled'])}Q", *landlock["handled"])
    rules = LIBC.syscall(CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    if rules < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    for path, rights in [*landlock["rules"], [folder, landlock["folder"]]]:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rights &= landlock["handled"][0] if os.path.isdir(path) else landlock["of_files"]
        if LIBC.syscall(ADD_RULE, rules, 1, struct.pack("<Qi", rights, place), 0):
            raise OSError(ctypes.get_errno(), f"landlock_add_rule {path}")
        os.close(place)
    return rules


def confine(settings, rules, link) -> None:
    """Give up all that the program may not have, and tell the supervisor. Raises OSError."""
    LIBC.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    if rules is not None and LIBC.syscall(RESTRICT_SELF, rules, 0):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    if settings["seccomp"]:
        steps = bytes.fromhex(settings["seccomp"])
        held = ctypes.create_string_buffer(steps, len(steps))
        program = struct.pack("HxxxxxxQ", len(steps) // 8, ctypes.addressof(held))
        if LIBC.prctl(SECCOMP, 2, program, 0, 0):
            raise OSError(ctypes.get_errno(), "seccomp")
    LIBC.prctl(DUMPABLE, 1, 0, 0, 0)
    link.send(CONFINED)
    if settings["traced"]:
        link.recv(1)  # bounded: this process ends with the supervisor


def limit(limits) -> None:
    seconds = limits["cpu_seconds"]
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, limits["disk"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["tasks"]),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        ceiling = resource.getrlimit(what)[1]
        most = most if ceiling == resource.RLIM_INFINITY else min(most, ceiling)
        hard = most + 1 if what == resource.RLIMIT_CPU and ceiling == resource.RLIM_INFINITY else most
        resource.setrlimit(what, (most, hard))


def source_run(source, paths, args) -> int:
    """Run Python source as `__main__` in this interpreter. Returns its exit status."""
    module = type(sys)("__main__")
    sys.modules["__main__"], sys.argv = module, ["main.py", *args]
    sys.path[:0] = ["", *paths]
    builtins.exit = builtins.quit = _sitebuiltins.Quitter("exit", "Ctrl-D")  # `site` would give it
    code = 0
    try:
        exec(compile(source, "main.py", "exec"), module.__dict__)
    except SystemExit as ended:
        code = status_of(ended)
    except BaseException as error:
        shown(error, source)
        code = 1
    return code if finished() else code or 120


def shown(error, source) -> None:
    """Print a traceback with the source's lines, without the frames above them."""
    import linecache
    import traceback  # imported late: most programs do not fail, and a start should be short

    linecache.cache["main.py"] = (len(source), None, source.splitlines(True), "main.py")
    traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)


def status_of(ended) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return (ended.code or 0) & 0xFF
    print(ended.code, file=sys.stderr)
    return 1


def finished() -> bool:
    """Do what an interpreter does at its end: join threads, call exit functions, flush."""
    import atexit

    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        return False
    return True
