"""Small sources of C++ as shared libraries by g++, in which undefined behaviour ends the process with a sentence.

They declare themselves what they call of C, and use nothing of C++'s own library.
"""

import ctypes
import functools
import subprocess


@functools.cache
def runtime():
    """What links UBSan's runtime: nothing where it can be loaded, once for all libraries.

    To link each with the static one, and with C++'s own library that this needs, takes as long as to compile a kernel.
    """
    found = subprocess.run(["g++", "-print-file-name=libubsan.so"], capture_output=True, text=True, check=True)
    try:
        ctypes.CDLL(found.stdout.strip(), mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return ("-static-libubsan",)
    return ("-nostdlib", "-fno-use-linker-plugin", "-Wl,-z,now", "-lgcc")


def built(name, text, *options):
    """The path of a library that is made of a text; both get `name`, a path without an ending."""
    source, library = f"{name}.cpp", f"{name}.so"
    with open(source, "w") as file:
        file.write(text)
    checks = ("-fsanitize=undefined", "-fno-sanitize-recover=all")
    command = ["g++", *checks, *options, "-shared", "-fPIC", source, "-o", library, *runtime()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]
    return library
