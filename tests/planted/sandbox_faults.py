"""Faults of the sandbox, and of the reward that runs programs in it. See `faults`."""

from __future__ import annotations

from faults import Fault

SANDBOX_FAULTS = [
    Fault(
        "a sandbox refuses no sockets",
        "found = [*ALWAYS, *(LOCAL_SOCKETS if sockets else SOCKETS)]",
        "found = [*ALWAYS]",
        "sandbox/test_seccomp_filter.py sandbox/test_escapes.py",
    ),
    Fault(
        "a filter takes another machine's numbers",
        "        (RETURN, 0, 0, KILL),\n        (LOAD, 0, 0, NUMBER),",
        "        (RETURN, 0, 0, ALLOW),\n        (LOAD, 0, 0, NUMBER),",
        "sandbox/test_seccomp_filter.py",
    ),
    Fault(
        "the supervisor shows its memory to a sandboxed program",
        "    LIBC.prctl(DUMPABLE, 0, 0, 0, 0)  # programs",
        "    LIBC.prctl(DUMPABLE, 1, 0, 0, 0)  # programs",
        "sandbox/test_escapes.py::test_the_supervisor_is_closed",
    ),
    Fault(
        "a sandboxed program of no own user is not traced",
        '"traced": not user}',
        '"traced": False}',
        "sandbox/test_fork_tracer.py",
    ),
    Fault(
        "a program that could not be confined is judged",
        '"unconfined": watch.unconfined}',
        '"unconfined": ""}',
        "sandbox/test_fork_tracer.py",
    ),
    Fault(
        "a sandboxed program leaves processes behind",
        "        status, peak = end_all(settings, pid)",
        "        status, peak = os.wait4(pid, 0)[1], 0",
        "sandbox/test_executions.py::test_a_process_that_is_left_behind_is_ended",
    ),
    Fault(
        "a sandboxed program keeps a changed folder for the next one",
        "        os.chmod(above, 0o755)",
        "        pass",
        "sandbox/test_executions.py::test_one_program_finds_nothing_of_another",
    ),
    Fault(
        "an object of the tested code equals what it says",
        "if isinstance(other, Remote) else NotImplemented",
        "",
        "envs/code_checks/test_code_reward.py",
    ),
    Fault(
        "tests take Python's own names from the tested code",
        "if name not in own and not hasattr(builtins, name)}",
        "if name not in own}",
        "envs/code_checks/test_code_reward.py",
    ),
    Fault(
        "an exception of the tested code ends a loop of the tests",
        'return StopIteration() if ends else RuntimeError("the tested code raised StopIteration")',
        "return StopIteration()",
        "envs/code_checks/test_code_reward.py",
    ),
    Fault(
        "the tested code reads the tests by their functions",
        "            if self.guarded:",
        "            if False:",
        "envs/code_checks/test_code_reward.py",
    ),
]
