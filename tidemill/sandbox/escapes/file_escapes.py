"""Escapes to files: secrets, system folders, devices, and the folders of others."""

import glob
import os
import stat
import threading

from tidemill.sandbox.escapes.escape_tools import call, ended_well, harmful, read


def _has_secret(stage, path):
    return stage["secret"].encode() in read(path)


def file_outside(stage):
    """Read a file outside that everybody may read."""
    return _has_secret(stage, stage["file"])


def written_outside(stage):
    """Write a file into a folder outside that everybody may write to."""
    with open(os.path.join(stage["folder"], "written"), "w"):
        return True


def opened_to_write(stage):
    """Open a file outside to write to it."""
    with open(stage["open_file"], "r+b"):
        return True


def truncated(stage):
    """Cut a file outside, which needs no descriptor."""
    os.truncate(stage["open_file"], 1)
    return True


def removed(stage):
    """Remove a file outside."""
    path = os.path.join(stage["folder"], "removed")
    os.unlink(path)
    return True


def renamed(stage):
    """Move a file from outside to here."""
    os.rename(os.path.join(stage["folder"], "renamed"), "renamed")
    return True


def changed_rights(stage):
    """Change the rights of a file outside."""
    os.chmod(stage["file"], 0o644)
    return True


def changed_owner(stage):
    """Change the owner of a file outside."""
    there = os.stat(stage["file"])
    os.chown(stage["file"], there.st_uid, there.st_gid)
    return True


def changed_times(stage):
    """Change the times of a file outside."""
    os.utime(stage["file"], (1, 1))
    return True


def changed_attributes(stage):
    """Set an extended attribute of a file outside."""
    os.setxattr(stage["file"], "user.escape", b"x")
    return True


def link_out(stage):
    """Read a file outside by a symbolic link."""
    os.symlink(stage["file"], "link")
    return _has_secret(stage, "link")


def write_by_link(stage):
    """Write outside by a symbolic link to a folder."""
    os.symlink(stage["folder"], "folder-link")
    with open("folder-link/by-link", "w"):
        return True


def hard_link(stage):
    """Read a file outside by a hard link in here."""
    os.link(stage["file"], "hard")
    return _has_secret(stage, "hard")


def switched_link(stage):
    """Switch a link between in here and outside, while another thread opens what is behind it."""
    os.makedirs("inside", exist_ok=True)
    name = os.path.basename(stage["file"])
    open(f"inside/{name}", "w").close()
    ended = threading.Event()

    def switch():
        while not ended.is_set():
            for place in ("inside", os.path.dirname(stage["file"])):
                os.symlink(place, "next")
                os.rename("next", "switched")

    thread = threading.Thread(target=switch)
    thread.start()
    try:
        for _ in range(3000):
            try:
                if _has_secret(stage, f"switched/{name}"):
                    return True
            except OSError:
                continue
    finally:
        ended.set()
        thread.join()


def way_up(stage):
    """Read a file outside by a path of many `..`."""
    return _has_secret(stage, "../" * 30 + stage["file"].lstrip("/"))


def own_root(stage):
    """Read a file outside by /proc/self/root and /proc/self/cwd."""
    for start in ("/proc/self/root", "/proc/self/cwd" + "/.." * 10, "/proc/thread-self/root", "/proc/1/root"):
        try:
            if _has_secret(stage, start + stage["file"]):
                return start
        except OSError:
            continue


def home_folders(stage):
    """List the home folders of people."""
    return [os.listdir(place) for place in ("/root", "/home", stage["home"])]


def folder_of_the_code(stage):
    """List the folder with the code of the system, beside which its runs lie."""
    return os.listdir(stage["code"])


def machines_shared_memory(stage):
    """Read a file of the machine's /dev/shm."""
    return _has_secret(stage, stage["shared"])


def machines_temporary_files(stage):
    """Find a file in the machine's /tmp."""
    return [path for path in glob.glob("/tmp/*/*") if path == stage["temporary"] and _has_secret(stage, path)]


def another_execution(stage):
    """Find the folder of another execution, and read a file in it."""
    for path in glob.glob("/tmp/*/*") + glob.glob("/tmp/*/*/*") + glob.glob("/proc/*/cwd/*"):
        try:
            if os.path.basename(path) == "of-another-execution" and _has_secret(stage, path):
                return path
        except OSError:
            continue


def system_folders(stage):
    """Write into the system's folders."""
    for place in ("/usr", "/usr/lib", "/usr/local", "/etc", "/lib", "/", "/var", os.path.dirname(os.__file__)):
        path = os.path.join(place, "tidemill-escape")
        try:
            with open(path, "w"):
                os.unlink(path)
                return place
        except OSError:
            continue


def password_hashes(stage):
    """Read the password hashes."""
    return read("/etc/shadow")


def memory_device(stage):
    """Read the machine's memory by its devices."""
    for path in ("/dev/mem", "/dev/kmem", "/dev/port", "/proc/kcore"):
        try:
            with open(path, "rb", buffering=0) as file:
                return file.read(16)
        except OSError:
            continue


def disks(stage):
    """Read the machine's disks past all file systems."""
    for path in glob.glob("/dev/[hsv]d[a-z]") + glob.glob("/dev/nvme*n1"):
        try:
            return read(path)
        except OSError:
            continue


def new_device(stage):
    """Make a device file of the memory or a disk, and read it."""
    for kind, major, minor in ((stat.S_IFCHR, 1, 1), (stat.S_IFBLK, 254, 0), (stat.S_IFBLK, 8, 0), (stat.S_IFBLK, 7, 0)):
        try:
            os.mknod(f"device-{major}-{minor}", kind | 0o666, os.makedev(major, minor))
            return major
        except OSError:
            continue


def system_request(stage):
    """Write to /proc/sysrq-trigger."""
    handle = os.open("/proc/sysrq-trigger", os.O_WRONLY)
    os.close(handle)
    return True


def kernel_settings(stage):
    """Open a setting of the kernel to write it."""
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/sys/kernel/mm/transparent_hugepage/enabled"):
        try:
            os.close(os.open(path, os.O_WRONLY))
            return path
        except OSError:
            continue


def kernel_addresses(stage):
    """Read the addresses of the kernel's functions."""
    return any(not line.startswith(b"0000000000000000") for line in read("/proc/kallsyms").splitlines()[:100])


def debugging_files(stage):
    """Use the kernel's debugging file systems."""
    return os.listdir("/sys/kernel/debug") or os.listdir("/sys/kernel/tracing")


@harmful
def scheduled_elsewhere(stage):
    """Leave a program that the machine runs later."""
    for place in ("/etc/cron.d", "/etc/profile.d", "/etc/systemd/system", "/var/spool/cron"):
        try:
            with open(os.path.join(place, "tidemill-escape"), "w"):
                return place
        except OSError:
            continue


def run_from_outside(stage):
    """Run a program that lies outside of the system's folders."""
    return ended_well(lambda: os.execv(stage["program"], ["program"]))


def kept_descriptor(stage):
    """Reach files by a descriptor of the machine's root folder that another process holds."""
    return _has_secret(stage, f"/proc/{stage['victim']}/fd/{stage['descriptor']}/{stage['file'].lstrip('/')}")


def changed_by_descriptor(stage):
    """Change the rights of a system file by a descriptor that was opened to read it."""
    handle = os.open("/bin/true", os.O_RDONLY)
    return call(91, 52, handle, 0o755) == 0
