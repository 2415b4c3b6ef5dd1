#!/usr/bin/env python3
"""Writes generated.rs, which has the functions that no answers! block defines by hand.

    src/phantom/device/table/generate.py PYTHON...

Each PYTHON is an interpreter with torch. The list has every CUDA-family name that a library of torch leaves
undefined, and every other name of the driver's header, which is refused. A name stays in the list even if no
library of the given environments needs it, so torch versions can be added one at a time.

A generated function does nothing and returns success. Where the header in the wheels shows an out-parameter
that the caller uses (a handle, a size, a count), the function fills it.
"""

import glob
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
FAMILIES = re.compile(
    r"(__cuda|cuda|cublas|cudnn|cusparse|cusolver|cufft|curand|nccl|nvrtc|nvJitLink|nvshmem|cupti|cuFile|cu[A-Z])"
)
HEADERS = re.compile(r"(cublas|cudnn|cusparse|cusolver|cufft|curand|nccl)")
NUMBERS = {
    "size_t": "usize",
    "int64_t": "i64",
    "int": "c_int",
    "unsigned int": "u32",
    "cusparseIndexBase_t": "c_int",
}
# Matches the functions of a math library that run on the device, and not those that only store a setting.
WORK = re.compile(
    r"(?:cublas|cusolver|cusparse|cufft|curand|cudnn)(?!.*(?:Create|Destroy|Set|Get|Init|Support|bufferSize|MatDescr|Version|nnz$)).*"
)
SIZES = re.compile(r"size|bytes|buffer|work|num|count|nnz|rank|position|rows|cols", re.I)


def site_packages(python):
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def wanted(site):
    """Returns the functions of CUDA and its libraries that torch's libraries import (undefined symbols)."""
    names = set()
    for library in glob.glob(f"{site}/torch/lib/*.so"):
        lines = subprocess.run(
            ["nm", "-D", "--undefined-only", library], check=True, capture_output=True, text=True
        )
        for line in lines.stdout.splitlines():
            name = line.split()[-1].split("@")[0]
            if FAMILIES.match(name):
                names.add(name)
    return names


def text_of(header):
    """Returns the declarations of a header, without comments and preprocessor lines."""
    with open(header, errors="replace") as file:
        text = file.read()
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*$", "", text, flags=re.M)


def prototypes(site):
    """Returns the parameter list of each function in the headers of the wheels."""
    found = {}
    for pattern in ("nvidia/*/include/*.h", "cusparselt/include/*.h"):
        for header in sorted(glob.glob(f"{site}/{pattern}")):
            if HEADERS.match(os.path.basename(header)):
                for match in re.finditer(
                    r"\b(\w+)\s*\(([^(){};]*)\)\s*(?:\w+\s*(?:\([^;]*?\))?\s*)?;", text_of(header)
                ):
                    found.setdefault(match[1], match[2])
    return found


def driver_names(site):
    """Returns the functions of the driver's header, and the versioned names to which its macros expand."""
    names = set()
    for header in glob.glob(f"{site}/nvidia/*/include/cuda.h"):
        with open(header, errors="replace") as file:
            text = file.read()
        names |= set(re.findall(r"CUresult CUDAAPI (cu[A-Z]\w+)\s*\(", text))
        names |= set(re.findall(r"#\s*define\s+cu\w+\s+(?:__CUDA_API_PT[DS]\w*\()?(cu[A-Z]\w+_v\d)", text))
    return names


def by_hand():
    """Returns the names that an answers! block defines."""
    names = set()
    for source in glob.glob(f"{HERE}/../*/*.rs"):
        if os.path.basename(source) != "generated.rs":
            with open(source) as file:
                heads = re.findall(
                    r"^\s*(?:Real|Guess|Success|Unsupported) fn (\w+|\{[^}]*\})", file.read(), re.M
                )
                names |= set(re.findall(r"\w+", " ".join(heads)))
    return names


def passed_through():
    """Returns the patterns of the names that are left to the real libraries."""
    with open(f"{HERE}/passthrough.txt") as file:
        return [re.compile(line.strip()) for line in file if line.strip() and not line.startswith("#")]


def parameters(name, prototype):
    """Returns the Rust parameters and the values to write through them, or None without an out-parameter."""
    arguments, fills = [], []
    for index, text in enumerate(re.sub(r"\s+", " ", part).strip() for part in prototype.split(",")):
        text = re.sub(r"\[\s*\w*\s*\]$", "", text)
        if "*" not in text:
            scalar = re.match(r"(?:const )?(float|double|cu\w*[Cc]omplex)\b", text)
            # A complex number is a struct that is passed in a vector register, like a double.
            kind = {"float": "f32", "double": "f64"}.get(scalar[1], "f64") if scalar else "Word"
            arguments.append(f"_a{index}: {kind}")
            continue
        base, label, stars = text.split("*")[0].strip(), text.split("*")[-1].strip(), text.count("*")
        creates = re.search(r"Create|Init|Alloc", name)
        kind, value = None, None
        if base.startswith("const"):
            pass
        elif stars == 1 and base in NUMBERS and (SIZES.search(label) or base == "int64_t"):
            kind, value = NUMBERS[base], "0"
        elif stars == 1 and base == "int" and label.lower() in ("info_host", "h_info", "major", "minor"):
            kind, value = "c_int", "0"
        elif (
            stars == 1 and base == "int" and label == "info" and re.search(r"geqrfBatched|gelsBatched", name)
        ):
            kind, value = "c_int", "0"  # `info` is in host memory; most of the family has it on the device.
        elif creates and ((stars == 1 and re.search(r"(_t|Info|Descr|Handle)$", base)) or stars == 2):
            kind, value = "usize", "opaque_handle()"
        if kind is None:
            arguments.append(f"_a{index}: Word")
        else:
            arguments.append(f"a{index}: Out<{kind}>")
            fills.append((f"a{index}", value))
    return (arguments, fills) if fills else None


def kept(section):
    """Returns the lines of a section of the existing generated.rs, by function name."""
    path = f"{HERE}/generated.rs"
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        match = re.search(rf"^{section}! \{{\n(.*?)^\}}", file.read(), re.M | re.S)
    return (
        {
            re.match(r"\s*(?:Guess |Success )?(\w+)", line)[1]: line.strip()
            for line in match[1].splitlines()
            if line.strip()
        }
        if match
        else {}
    )


def main(pythons):
    if not pythons:
        sys.exit(__doc__)
    names, shapes, driver = set(), {}, set()
    for python in pythons:
        site = site_packages(python)
        names |= wanted(site)
        driver |= driver_names(site)
        for name, prototype in prototypes(site).items():
            shapes.setdefault(name, prototype)
    hand, through = by_hand(), passed_through()
    skip = lambda name: name in hand or any(pattern.fullmatch(name) for pattern in through)
    success, work, fills = kept("success"), kept("work"), kept("fills")
    for section in (success, work, fills):
        for name in names:
            section.pop(name, None)
    for name in names:
        if name in success or name in work or name in fills or skip(name):
            continue
        shape = parameters(name, shapes.get(name, ""))
        if shape:
            body = " ".join(f"{place} = {value};" for place, value in shape[1])
            # Any handle is a correct answer, but a size is a guess.
            kind = "Success" if all(value == "opaque_handle()" for _, value in shape[1]) else "Guess"
            fills[name] = f"{kind} {name}({', '.join(shape[0])}) {{ {body} }}"
        else:
            (work if WORK.fullmatch(name) else success)[name] = f"{name},"
    refused = {**kept("refuse"), **{name: f"{name}," for name in driver}}
    sections = []
    for section, entries in (("success", success), ("work", work), ("fills", fills), ("refuse", refused)):
        for name in list(entries):
            if skip(name) or (section == "refuse" and (name in success or name in work or name in fills)):
                del entries[name]
        lines = "".join(f"    {entries[name]}\n" for name in sorted(entries))
        sections.append(f"{section}! {{\n{lines}}}\n")
        print(f"{section}: {len(entries)}")
    with open(f"{HERE}/generated.rs", "w") as file:
        file.write(HEAD + "\n".join(sections))


HEAD = """\
//! The functions that no file answers by hand. Written by `generate.py`: edit that, or answer a name by hand
//! and run it again.
//!
//! `success!` does nothing, `work!` takes device time, `fills!` fills out-parameters. `refuse!` has the names
//! of the driver that torch does not want, which a program can only look up by name.

use std::ffi::c_int;

use crate::core::ffi::{Out, Word, opaque_handle};
use crate::table::generated_macros::{fills, refuse, success, work};

"""

if __name__ == "__main__":
    main(sys.argv[1:])
