"""`python -m dispatch cache [list | clear | path | precompile | export FILE | import FILE]`: the caches on disk.

They are the results of autotune (`autotune.py` writes them), compiled kernels (`libraries/nvrtc/kernel_cache.py`), and
caches of the libraries (`execute/library_cache.py`).
This command only reads the files, deletes them and nothing else in the folder, and exports and imports kernels in
packs.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dispatch.cli import print_aligned, print_json, say
from dispatch.errors import DispatchError
from dispatch.execute import private_files as private
from dispatch.execute.library_cache import PATTERN as PATTERN_OF_LIBRARIES
from dispatch.execute.library_cache import Stored
from dispatch.execute.private_files import cache_folder

if TYPE_CHECKING:
    import argparse

    from dispatch.libraries.nvrtc.kernel_cache import Store

__all__ = ["add_arguments", "entries", "kernels", "library_caches", "run"]

PATTERN = "autotune-*.json*"  # including the files that killed processes have left half written
ACTIONS = {
    "list": "results of autotune, compiled kernels, and the libraries' own caches",
    "clear": "delete them",
    "path": "the folder that contains them",
    "precompile": "compile the kernels of the table's rows now",
    "export": "write the compiled kernels to a pack",
    "import": "import the kernels of a pack, for machines without NVRTC and headers",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `cache`."""
    actions = "; ".join(f"{name}: {text}" for name, text in ACTIONS.items())
    parser.add_argument("action", nargs="?", choices=tuple(ACTIONS), default="list", help=f"{actions} (default: list)")
    parser.add_argument("file", nargs="?", type=Path, help="the pack to write or to read")
    parser.add_argument("--arch", help="with import: kernels for this architecture only, such as sm_90a")
    parser.add_argument("--op", help="with precompile: kernels of this op only")
    parser.add_argument("--json", action="store_true", help="print one object")


def run(options: argparse.Namespace) -> int:
    """Run the action."""
    if (options.file is None) == (options.action in ("export", "import")):
        need = "needs a file" if options.file is None else "takes no file"
        raise DispatchError(f"cache {options.action} {need}")
    if options.action in ("precompile", "export", "import"):
        return _transfer_kernels(options)
    folder = cache_folder()
    tuned, compiled, caches = entries(folder), kernels(folder), library_caches(folder)
    removed = 0
    if options.action == "clear":
        removed = sum(_remove(Path(entry["path"])) for entry in (*tuned, *compiled, *caches))
    if options.json:
        facts = {"folder": str(folder), "files": tuned, "kernels": compiled, "caches": caches, "removed": removed}
        print_json(facts)
    elif options.action == "path":
        say(str(folder))
    elif options.action == "clear":
        say(f"removed {removed} files from {folder}")
    else:
        _list(folder, tuned, compiled, caches)
    return 0


def _list(folder: Path, found: list[dict[str, Any]], compiled: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    if found:
        lines = [(e["gpu"] or "?", e["library"] or "?", str(e["algorithms"]), e["state"], e["path"]) for e in found]
        print_aligned([("gpu", "library", "algorithms", "state", "file"), *lines])
    won = [(kernel, request) for entry in found for request, kernel in entry["won"].items()]
    if won:
        print_aligned([("won", "request"), *won])
    if compiled:
        lines = [(e["target"], f"{e['seconds']:.0f} s", str(e["bytes"]), e["state"], e["label"]) for e in compiled]
        print_aligned([("target", "compiled in", "bytes", "state", "kernel"), *lines])
    if own:
        rows = [(e["gpu"], e["library"], e["kind"], str(e["bytes"]), e["state"], e["path"]) for e in own]
        print_aligned([("gpu", "library", "of its own", "bytes", "state", "file"), *rows])
    if not found and not compiled and not own:
        say(f"{folder} is empty; requests with autotune=True and requests whose kernels NVRTC compiles fill it")


def _transfer_kernels(options: argparse.Namespace) -> int:
    """Compile kernels, or export them to a pack, or import them from one."""
    from dispatch.libraries.nvrtc.kernel_cache import store

    kernel_store: Store = store()
    if options.action == "export":
        count = kernel_store.export_pack(options.file)
        facts = {"file": str(options.file), "kernels": count}
        text = f"{count} kernels in {options.file}"
    elif options.action == "import":
        imported = kernel_store.import_pack(options.file, [options.arch] if options.arch else None)
        facts = {"file": str(options.file), "kernels": len(imported)}
        text = f"{len(imported)} kernels from {options.file}"
    else:
        from dispatch.cli.precompile import precompile

        count = precompile(options.op)
        facts, text = {"kernels": count}, f"{count} kernels are ready"
    print_json(facts) if options.json else say(text)
    return 0


def entries(folder: Path) -> list[dict[str, Any]]:
    """The autotune files of a folder: path, bytes, GPU, library, number of algorithms, and whether it can be read.

    `won` maps requests to kernels, for outcomes that name one: those of ops for which several libraries race.
    """
    return [_entry(path) for path in sorted(folder.glob(PATTERN)) if path.is_file()]


def kernels(folder: Path) -> list[dict[str, Any]]:
    """The compiled kernels below a folder: path, bytes, target, seconds to compile, label, and whether valid."""
    from dispatch.libraries.nvrtc.kernel_cache import Entry

    facts_of_kernels = []
    for path in sorted((folder / "kernels" / "entries").rglob("*")):
        if not path.is_file():
            continue
        data = _read_file(path)
        entry = Entry.unpack(data)
        facts = {"path": str(path), "bytes": len(data), "target": "?", "seconds": 0.0, "label": "?"}
        if entry is None:
            facts_of_kernels.append(facts | {"state": "damaged: ignored, and rebuilt at its next use"})
        else:
            facts |= {"target": entry.target, "seconds": entry.seconds, "label": entry.label}
            facts_of_kernels.append(facts | {"kernel": entry.kernel, "toolchain": entry.toolchain, "state": "good"})
    return facts_of_kernels


def library_caches(folder: Path) -> list[dict[str, Any]]:
    """The caches of libraries in a folder: path, bytes, kind, GPU, library, and whether it is valid."""
    caches = []
    for path in sorted(folder.glob(PATTERN_OF_LIBRARIES)):
        if not path.is_file():
            continue
        data = _read_file(path)
        stored = Stored.unpack(data)
        facts: dict[str, Any] = {"path": str(path), "bytes": len(data)}
        if stored is None:
            facts |= {"kind": "?", "gpu": "?", "library": "?", "state": "damaged: ignored, and will be rewritten"}
        else:
            facts |= {"kind": stored.kind, "gpu": stored.gpu, "library": stored.library, "state": "good"}
        caches.append(facts)
    return caches


def _read_file(path: Path) -> bytes:
    """The contents of a file of this user; empty if the file is another user's, or cannot be read."""
    try:
        return private.read(path)
    except OSError:
        return b""


def _entry(path: Path) -> dict[str, Any]:
    data = _read_file(path)
    entry: dict[str, Any] = {"path": str(path), "bytes": len(data), "gpu": None, "library": None}
    try:
        stored = json.loads(data)
        stamp, algorithms = stored["stamp"], dict(stored["algorithms"].items())
        return entry | {
            "gpu": str(stamp["gpu"]),
            "library": str(stamp["library"]),
            "algorithms": len(algorithms),
            "won": {key: kernel for key, (blob, _) in algorithms.items() if (kernel := _kernel(blob))},
            "state": "good",
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return entry | {"algorithms": 0, "won": {}, "state": "damaged: ignored, and rebuilt by the next autotune"}


def _kernel(blob: str) -> str:
    """The kernel that an outcome names; "" if it is in a library's serialized form."""
    try:
        return str(json.loads(base64.b64decode(blob))["kernel"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:  # another process has removed it
        return False
    return True
