"""Reads a Containerfile, and runs its steps in root folders of their own, without an engine.

A root has the system's programs (/usr, read-only) and Python, with the dependencies of this
environment; all other folders are new. RUN steps are commands of `chroot` in a mount namespace.
Base images are not pulled, and pip has no index: what a step needs must be there.
"""

import json
import re
import shlex
import shutil
import site
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

STEPS = re.compile(r"^([A-Z]+)\s+(.+)$", re.DOTALL)
LINKS = ("bin", "sbin", "lib", "lib64")  # to the same names in /usr
EMPTY = ("dev", "proc", "usr", "tmp", "opt", "etc", "var", "data", "root", "home")
ENTER = """
set -e
root=$1; shift
mount --rbind /usr "$root/usr"
mount --rbind /dev "$root/dev"
mount --rbind /proc "$root/proc"
mount --bind "$PYTHON" "$root$PYTHON"
mount --bind "$PACKAGES" "$root$PACKAGES"
exec chroot "$@"
"""


@dataclass
class Stage:
    """One FROM with its instructions, and the root folder in which they run."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        """The values of every instruction of a kind."""
        return [value for kind, value in self.steps if kind == word]

    def words(self, kind: str) -> list[str]:
        """The words of an instruction in its JSON form."""
        [value] = self.all(kind)
        found: list[str] = json.loads(value)
        return found

    @property
    def health(self) -> list[str]:
        """The command of HEALTHCHECK."""
        [value] = self.all("HEALTHCHECK")
        found: list[str] = json.loads(value.partition("CMD ")[2])
        return found


def parse(path: Path) -> list[Stage]:
    """The stages of a Containerfile."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    stages: list[Stage] = []
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        matched = STEPS.match(line)
        assert matched, line
        kind, value = matched.groups()
        if kind == "FROM":
            base, _, name = value.partition(" AS ")
            stages.append(Stage(base, name))
        else:
            stages[-1].steps.append((kind, value.strip()))
    return stages


def split_copy(value: str) -> tuple[str, list[str], str]:
    """The stage that a COPY reads from ("" for the repository), its sources and its target."""
    words = shlex.split(value)
    origin = words.pop(0).removeprefix("--from=") if words[0].startswith("--from=") else ""
    return origin, words[:-1], words[-1]


class Builder:
    """Runs stages one after another, each in a folder of `place`."""

    def __init__(self, place: Path, context: Path) -> None:
        self.place, self.context = place, context
        self.python = Path(sys.base_prefix)
        self.packages = Path(site.getsitepackages()[0])

    def build(self, stages: list[Stage]) -> Path:
        """Run all steps; the root folder of the last stage."""
        roots: dict[str, Path] = {}
        for number, stage in enumerate(stages):
            root = roots[stage.name] = self.place / f"stage-{number}"
            self._prepare(root)
            folder, arguments = "/", {}
            for kind, value in stage.steps:
                if kind == "WORKDIR":
                    folder = value
                    (root / folder[1:]).mkdir(parents=True, exist_ok=True)
                elif kind == "ARG":
                    name, _, given = value.partition("=")
                    arguments[name] = given
                elif kind == "COPY":
                    self._copy(value, roots, root, folder)
                elif kind == "RUN":
                    self.run(root, value, arguments, folder)
        return root

    def _prepare(self, root: Path) -> None:
        for name in (*EMPTY, str(self.python)[1:], str(self.packages)[1:]):
            (root / name).mkdir(parents=True, exist_ok=True)
        for name in LINKS:
            if (Path("/") / name).exists():
                (root / name).symlink_to(f"usr/{name}")
        (root / "tmp").chmod(0o1777)
        (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
        (root / "etc" / "group").write_text("root:x:0:\n")
        for name in ("shadow", "gshadow"):
            (root / "etc" / name).write_text("")
        for name in ("ld.so.cache", "login.defs"):
            shutil.copy(Path("/etc") / name, root / "etc")
        self._link_dependencies(root / "base")

    def _link_dependencies(self, base: Path) -> None:
        """All packages but this one, which is installed editable: it would lead to the checkout."""
        base.mkdir()
        for one in self.packages.iterdir():
            if one.suffix != ".pth" and not one.name.lower().startswith(("rlhf", "__editable__")):
                (base / one.name).symlink_to(one)

    def _copy(self, value: str, roots: dict[str, Path], root: Path, folder: str) -> None:
        origin, sources, target = split_copy(value)
        source = roots[origin] if origin else self.context
        place = root / str(Path(folder) / target)[1:]
        for name in sources:
            one = source / name.lstrip("/")
            if one.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(one, place, dirs_exist_ok=True, ignore=ignored)
            else:
                into = place / one.name if target.endswith("/") else place
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(one, into)

    def run(
        self,
        root: Path,
        script: str,
        variables: dict[str, str],
        folder: str = "/",
        user: str = "root",
    ) -> str:
        """What a shell script in a root prints; it must succeed. The network is its own."""
        environment = {
            "PATH": f"{self.python}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": "/tmp",
            "PYTHONPATH": "/base",
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip takes 0 for yes
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            **variables,
        }
        command = ["unshare", "--mount", "--net", "sh", "-c", f"ip link set lo up\n{ENTER}", "sh"]
        command += [str(root), f"--userspec={user}", str(root)]
        command += ["/usr/bin/env", "-i", f"--chdir={folder}"]
        command += [*(f"{name}={value}" for name, value in environment.items()), "sh", "-c", script]
        outside = {"PYTHON": str(self.python), "PACKAGES": str(self.packages)}
        done = subprocess.run(
            command,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **outside},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout
