"""Build an environment of SGLang's CPU server for `pytest -m sglang`: `build_environment.py VLLM_ENVIRONMENT FOLDER`.

Package indexes hold no CPU build of SGLang's kernels. Its server runs without them, with the other packages of vLLM's
environment, if modules that it imports but never calls here are replaced by `absent_modules.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

PACKAGES = ("sglang==0.5.23", "orjson", "IPython", "traitlets", "gguf", "soundfile")
SERVER = "import sglang.launch_server, sglang.srt.entrypoints.http_server"


def build_environment(packages: Path, folder: Path) -> None:
    """Build it in `folder`, beside the packages of the environment `packages`, and import its server once."""
    venv.create(folder, with_pip=True, clear=True)
    python = str(folder.absolute() / "bin" / "python")
    site = Path(_site_of(folder))
    (site / "beside.pth").write_text(f"import site; site.addsitedir({_site_of(packages.absolute())!r})\n")
    (site / "absent_modules.py").write_text(Path(__file__).with_name("absent_modules.py").read_text())
    (site / "absent_modules.pth").write_text("import absent_modules\n")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES], check=True)
    subprocess.run([python, "-c", SERVER], check=True, env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1"})


def _site_of(environment: Path) -> str:
    return sysconfig.get_path("purelib", "venv", {"base": str(environment), "platbase": str(environment)})


if __name__ == "__main__":
    build_environment(Path(sys.argv[1]), Path(sys.argv[2]))
