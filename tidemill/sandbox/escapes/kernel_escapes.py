"""Escapes by the kernel: namespaces, mounts, modules, clocks, and calls that had many faults."""

import ctypes
import mmap
import os
import struct

from tidemill.sandbox.escapes.escape_tools import ARM, LIBC, call, ended_well, harmful, reached, read

NEW_USER, NEW_NET, SIGCHLD = 0x10000000, 0x40000000, 17


def user_namespace(stage):
    """Enter a new user namespace, and have all capabilities in it."""
    return call(272, 97, NEW_USER) == 0


def child_in_user_namespace(stage):
    """Start a child in a new user namespace."""
    pid = call(56, 220, NEW_USER | SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    return pid > 0


def child_by_clone3(stage):
    """Start a child in a new user namespace, with flags that lie in memory where no filter sees them."""
    pid = call(435, 435, struct.pack("8Q", NEW_USER, 0, 0, 0, SIGCHLD, 0, 0, 0), 64)
    if pid == 0:
        os._exit(0)
    return pid > 0


def network_namespace(stage):
    """Enter a new network namespace."""
    return call(272, 97, NEW_NET) == 0


def others_namespace(stage):
    """Enter the network namespace of another process."""
    handle = os.open(f"/proc/{stage['victim']}/ns/net", os.O_RDONLY)
    return call(308, 268, handle, 0) == 0


def mounted(stage):
    """Mount a file system."""
    os.makedirs("mounted", exist_ok=True)
    done = call(165, 40, b"tmpfs", b"mounted", b"tmpfs", 0, 0) == 0
    if done:
        call(166, 39, b"mounted", 0)
    return done


def remounted(stage):
    """Make a read-only folder writable again."""
    return call(165, 40, 0, b"/", 0, 32 | 4096, 0) == 0  # MS_REMOUNT, MS_BIND


def file_system_context(stage):
    """Mount by the newer calls."""
    return call(430, 430, b"tmpfs", 0) >= 0


def cloned_tree(stage):
    """Copy a tree of mounts by open_tree."""
    return call(428, 428, -100, b"/", 1) >= 0


def changed_root(stage):
    """Change the root folder, the first step out of a chroot."""
    return call(161, 51, b".") == 0


def bpf_map(stage):
    """Load something of BPF into the kernel."""
    return call(321, 280, 0, struct.pack("4I", 2, 4, 4, 1) + bytes(100), 116) >= 0


def performance_counter(stage):
    """Open a performance counter, which sees what others do."""
    attributes = struct.pack("IIQ", 1, 112, 0) + bytes(96)  # the software clock
    return call(298, 241, attributes, 0, -1, -1, 0) >= 0


def page_faults(stage):
    """Handle page faults in user space, as many attacks on the kernel do."""
    return call(323, 282, 0) >= 0


def submission_ring(stage):
    """Make system calls by io_uring, where no filter sees them."""
    return call(425, 425, 4, ctypes.create_string_buffer(120)) >= 0


def program_from_memory(stage):
    """Run a program that is no file."""
    handle = os.memfd_create("escape", 0)
    os.write(handle, read("/bin/true"))
    return ended_well(lambda: os.execve(handle, ["true"], {}))


@harmful
def kernel_by_kexec(stage):
    """Load another kernel."""
    return reached(call(246, 104, 0, 0, 0, 0))


def kernel_module(stage):
    """Load a module into the kernel."""
    return reached(call(175, 105, b"no module", 9, b""))


def reboot(stage):
    """Reboot the machine; the arguments are wrong on purpose."""
    return reached(call(169, 142, 1, 2, 3, 0))


def swap_space(stage):
    """Use a file as swap space."""
    return reached(call(167, 224, b"/does/not/exist", 0))


def accounting(stage):
    """Have the kernel write a record of all processes to a file."""
    return reached(call(163, 89, b"/does/not/exist"))


def clock(stage):
    """Set the clock; the pointer is wrong on purpose."""
    return reached(call(227, 112, 0, 0))


def adjusted_clock(stage):
    """Change the speed of the clock; the pointer is wrong on purpose."""
    return reached(call(305, 266, 0, 8))


def host_name(stage):
    """Set the machine's name."""
    name = os.uname().nodename.encode()
    return call(170, 161, name, len(name)) == 0


def kernel_log(stage):
    """Read the kernel's log."""
    return call(103, 116, 3, ctypes.create_string_buffer(64), 64) >= 0


def personality(stage):
    """Turn off the randomisation of addresses."""
    return call(135, 92, 0x0040000) >= 0


def input_and_output_ports(stage):
    """Reach the machine's devices by their ports (x86 only)."""
    return not ARM and call(172, 0, 3) == 0


def file_events(stage):
    """Watch the whole file system by fanotify."""
    return call(300, 262, 0, 0) >= 0


def folder_events(stage):
    """Watch a folder outside."""
    handle = LIBC.inotify_init()
    return call(254, 27, handle, stage["folder"].encode(), 0x100) >= 0


def file_handle(stage):
    """Open a file outside by its handle, past all folders."""
    handle, mount = ctypes.create_string_buffer(struct.pack("Ii", 64, 0) + bytes(64)), ctypes.c_int()
    named = call(303, 264, -100, stage["file"].encode(), handle, ctypes.byref(mount), 0)
    folder = os.open("/", os.O_RDONLY)
    return named == 0 and call(304, 265, folder, handle, os.O_RDONLY) >= 0


def _machine_code(code, value):
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    return function() == value


def calls_of_32_bits(stage):
    """Make a system call with the numbers of 32-bit programs, which a filter could mistake (int 0x80)."""
    return not ARM and _machine_code(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3", os.getpid())


def calls_of_x32(stage):
    """Make a system call with the numbers of x32."""
    return not ARM and call(0x40000000 | 39, 0) == os.getpid()


def newest_calls(stage):
    """Make a call that is newer than the filter (listmount)."""
    return call(458, 458, struct.pack("IIQQQ", 24, 0, 0xFFFFFFFFFFFFFFFF, 0, 0), bytes(64), 8, 0) != -38


def control_group(stage):
    """Make a control group, and take part in its notifications."""
    for place in ("/sys/fs/cgroup/tidemill-escape", "/sys/fs/cgroup/pids/tidemill-escape"):
        try:
            os.mkdir(place)
            os.rmdir(place)
            return place
        except OSError:
            continue
