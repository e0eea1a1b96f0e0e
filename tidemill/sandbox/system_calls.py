"""System calls that a sandboxed program may not make, and why.

Each line names a call, its number on x86-64 and on arm64 (None: there is none), and where needed the arguments with which it
is refused. What is not listed is allowed. Calls above NEWEST, which nobody has looked at, do not exist for the program.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

NEWEST = 456  # futex_requeue, Linux 6.7: the newest call that was considered; from 424 on, all machines share the numbers
ANY = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class ArgumentCheck:
    """A check of one argument's low 32 bits: refuse when `argument & mask` is among the values, or is not."""

    argument: int
    mask: int
    values: tuple[int, ...]
    refuse_others: bool = False  # refuse all but these values


@dataclass(frozen=True, slots=True)
class SystemCall:
    """A refused system call. With several checks, one that refuses is enough."""

    name: str
    x86_64: int | None
    arm64: int | None
    checks: tuple[ArgumentCheck, ...] = ()
    error: int = errno.EPERM


NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
UNTRACED = 0x00800000  # CLONE_UNTRACED: a task that `fork_tracer` would not see
FILE_KIND, CHARACTER_DEVICE, BLOCK_DEVICE = 0xF000, 0x2000, 0x6000
UNIX, INET, INET6, STREAM, TYPE = 1, 2, 10, 1, 0xF
SELF = ArgumentCheck(0, ANY, (0,), refuse_others=True)  # only for the calling process, named as 0
DEVICES = (CHARACTER_DEVICE, BLOCK_DEVICE)

OTHER_PROCESSES = (  # memory, descriptors and limits of other processes
    SystemCall("ptrace", 101, 117),
    SystemCall("process_vm_readv", 310, 270),
    SystemCall("process_vm_writev", 311, 271),
    SystemCall("kcmp", 312, 272),
    SystemCall("pidfd_getfd", 438, 438),
    SystemCall("process_madvise", 440, 440),
    SystemCall("process_mrelease", 448, 448),
    SystemCall("move_pages", 279, 239),
    SystemCall("migrate_pages", 256, 238),
    SystemCall("prlimit64", 302, 261, (SELF,)),
    SystemCall("sched_setaffinity", 203, 122, (SELF,)),
    SystemCall("sched_setscheduler", 144, 119),
    SystemCall("sched_setparam", 142, 118),
    SystemCall("sched_setattr", 314, 274),
    SystemCall("setpriority", 141, 140),
    SystemCall("ioprio_set", 251, 30),
)
KEYS = (  # the kernel's key rings know no namespaces
    SystemCall("add_key", 248, 217),
    SystemCall("request_key", 249, 218),
    SystemCall("keyctl", 250, 219),
)
NAMESPACES = (  # a new user namespace gives capabilities, with which more of the kernel can be attacked
    SystemCall("unshare", 272, 97),
    SystemCall("setns", 308, 268),
    SystemCall("clone", 56, 220, (ArgumentCheck(0, NEW_NAMESPACES | UNTRACED, (0,), refuse_others=True),)),
    SystemCall("clone3", 435, 435, error=errno.ENOSYS),  # its flags lie in memory; the C library then uses clone
    SystemCall("chroot", 161, 51),
    SystemCall("pivot_root", 155, 41),
    SystemCall("mount", 165, 40),
    SystemCall("umount2", 166, 39),
    SystemCall("open_tree", 428, 428),
    SystemCall("move_mount", 429, 429),
    SystemCall("fsopen", 430, 430),
    SystemCall("fsconfig", 431, 431),
    SystemCall("fsmount", 432, 432),
    SystemCall("fspick", 433, 433),
    SystemCall("mount_setattr", 442, 442),
)
KERNEL = (  # parts of the kernel with many faults in the past, and the administration of the machine
    SystemCall("bpf", 321, 280),
    SystemCall("perf_event_open", 298, 241),
    SystemCall("userfaultfd", 323, 282),
    SystemCall("io_uring_setup", 425, 425, error=errno.ENOSYS),
    SystemCall("io_uring_enter", 426, 426, error=errno.ENOSYS),
    SystemCall("io_uring_register", 427, 427, error=errno.ENOSYS),
    SystemCall("kexec_load", 246, 104),
    SystemCall("kexec_file_load", 320, 294),
    SystemCall("create_module", 174, None),
    SystemCall("init_module", 175, 105),
    SystemCall("finit_module", 313, 273),
    SystemCall("delete_module", 176, 106),
    SystemCall("get_kernel_syms", 177, None),
    SystemCall("query_module", 178, None),
    SystemCall("reboot", 169, 142),
    SystemCall("swapon", 167, 224),
    SystemCall("swapoff", 168, 225),
    SystemCall("acct", 163, 89),
    SystemCall("quotactl", 179, 60),
    SystemCall("quotactl_fd", 443, 443),
    SystemCall("syslog", 103, 116),
    SystemCall("lookup_dcookie", 212, 18),
    SystemCall("nfsservctl", 180, 42),
    SystemCall("iopl", 172, None),
    SystemCall("ioperm", 173, None),
    SystemCall("modify_ldt", 154, None),
    SystemCall("uselib", 134, None),
    SystemCall("_sysctl", 156, None),
    SystemCall("sysfs", 139, None),
    SystemCall("ustat", 136, None),
    SystemCall("vhangup", 153, 58),
    SystemCall("personality", 135, 92),
    SystemCall("remap_file_pages", 216, 234),
    SystemCall("mbind", 237, 235),
    SystemCall("set_mempolicy", 238, 237),
    SystemCall("set_mempolicy_home_node", 450, 450),
    SystemCall("fanotify_init", 300, 262),
    SystemCall("fanotify_mark", 301, 263),
    SystemCall("clock_settime", 227, 112),
    SystemCall("settimeofday", 164, 170),
    SystemCall("adjtimex", 159, 171),
    SystemCall("clock_adjtime", 305, 266),
    SystemCall("sethostname", 170, 161),
    SystemCall("setdomainname", 171, 162),
)
FILES = (  # ways to files that go around paths and permissions
    SystemCall("name_to_handle_at", 303, 264),
    SystemCall("open_by_handle_at", 304, 265),
    SystemCall("memfd_create", 319, 279),
    SystemCall("memfd_secret", 447, 447, error=errno.ENOSYS),
    SystemCall("mknod", 133, None, (ArgumentCheck(1, FILE_KIND, DEVICES),)),
    SystemCall("mknodat", 259, 33, (ArgumentCheck(2, FILE_KIND, DEVICES),)),
    SystemCall("ioctl", 16, 29, (ArgumentCheck(1, ANY, (0x5412, 0x541C)),)),  # TIOCSTI, TIOCLINUX: typing into a terminal
)
SOCKETS = (
    SystemCall("socket", 41, 198),
    SystemCall("socketpair", 53, 199, (ArgumentCheck(0, ANY, (UNIX,), refuse_others=True),)),
)
LOCAL_SOCKETS = (  # streams only, for a program that may reach one address: its network has nothing else
    SystemCall(
        "socket",
        41,
        198,
        (
            ArgumentCheck(0, ANY, (UNIX, INET, INET6), refuse_others=True),
            ArgumentCheck(1, TYPE, (STREAM,), refuse_others=True),
        ),
    ),
    SOCKETS[1],
)
SHARED_WITH_OTHERS = (  # without an IPC namespace these reach every process of the machine; Landlock does not know them
    SystemCall("shmget", 29, 194),
    SystemCall("shmat", 30, 196),
    SystemCall("shmctl", 31, 195),
    SystemCall("shmdt", 67, 197),
    SystemCall("semget", 64, 190),
    SystemCall("semop", 65, 193),
    SystemCall("semctl", 66, 191),
    SystemCall("semtimedop", 220, 192),
    SystemCall("msgget", 68, 186),
    SystemCall("msgsnd", 69, 189),
    SystemCall("msgrcv", 70, 188),
    SystemCall("msgctl", 71, 187),
    SystemCall("mq_open", 240, 180),
    SystemCall("mq_unlink", 241, 181),
    SystemCall("inotify_add_watch", 254, 27),
)
ATTRIBUTES = (  # of files: Landlock leaves them to the file's owner, who may be the one that started the sandbox
    SystemCall("chmod", 90, None),
    SystemCall("fchmod", 91, 52),
    SystemCall("fchmodat", 268, 53),
    SystemCall("fchmodat2", 452, 452),
    SystemCall("chown", 92, None),
    SystemCall("fchown", 93, 55),
    SystemCall("lchown", 94, None),
    SystemCall("fchownat", 260, 54),
    SystemCall("utime", 132, None),
    SystemCall("utimes", 235, None),
    SystemCall("futimesat", 261, None),
    SystemCall("utimensat", 280, 88),
    SystemCall("setxattr", 188, 5),
    SystemCall("lsetxattr", 189, 6),
    SystemCall("fsetxattr", 190, 7),
    SystemCall("removexattr", 197, 14),
    SystemCall("lremovexattr", 198, 15),
    SystemCall("fremovexattr", 199, 16),
)
SIGNALS = (  # where Landlock cannot keep them within the sandbox
    SystemCall("kill", 62, 129),
    SystemCall("tkill", 200, 130),
    SystemCall("tgkill", 234, 131),
    SystemCall("rt_sigqueueinfo", 129, 138),
    SystemCall("rt_tgsigqueueinfo", 297, 240),
    SystemCall("pidfd_send_signal", 424, 424),
)
ALWAYS = (*OTHER_PROCESSES, *KEYS, *NAMESPACES, *KERNEL, *FILES)


def refused(
    *, sockets: bool = False, shared: bool = True, own_files: bool = True, signals: bool = True
) -> tuple[SystemCall, ...]:
    """The refused calls of a sandbox.

    sockets: streams are allowed, in a network of its own. shared: it has an IPC namespace. own_files: no file outside of it
    belongs to its user. signals: they reach no process outside of it.
    """
    found = [*ALWAYS, *(LOCAL_SOCKETS if sockets else SOCKETS)]
    found += () if shared else SHARED_WITH_OTHERS
    found += () if own_files else ATTRIBUTES
    found += () if signals else SIGNALS
    return tuple(found)


def number_of(call: SystemCall, machine: str) -> int | None:
    """The call's number on a machine, "x86_64" or "arm64"; None where it does not exist."""
    return call.x86_64 if machine == "x86_64" else call.arm64
