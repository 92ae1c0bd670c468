"""Headless Chromium of QtWebEngine: loads a page from disk, returns its log and state.

    python tests/shared/browser.py PAGE < SCRIPT > ANSWER

SCRIPT is an expression. ANSWER is JSON: its ``result``, and ``logged``, what stands in the console.
With ``--picture FILE`` the first screen is saved too, ``--width`` and
``--height`` (1280, 900) in size, and in dark colours with ``--dark``.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

NEEDED = "needs a browser: pip install 'PySide6_Addons<6.10' brings one"


def installed():
    """Return True if QtWebEngine is installed, without importing it."""
    return bool(
        importlib.util.find_spec("PySide6") and importlib.util.find_spec("PySide6.QtWebEngineCore")
    )


def browse(page, script):
    """Run ``script`` in ``page`` in a separate process; return its result and the console."""
    done = subprocess.run(
        [sys.executable, __file__, str(page)],
        **{"input": script, "check": True, "capture_output": True, "text": True, "timeout": 120},
    )
    answer = json.loads(done.stdout)
    return answer["result"], answer["logged"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page")
    parser.add_argument("--picture")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--dark", action="store_true")
    words = parser.parse_args()
    flags = ["--disable-gpu", *(["--blink-settings=preferredColorScheme=0"] if words.dark else [])]
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    # the sandbox refuses to start for root, as which containers run
    os.environ["QTWEBENGINE_DISABLE_SANDBOX"] = "1"
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = " ".join(flags)
    from PySide6.QtCore import QTimer, QUrl
    from PySide6.QtWebEngineCore import QWebEnginePage
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    logged = []

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(self, level, message, line, source):  # noqa: N802  Qt's name
            logged.append(f"{level.name}: {message}")

    app = QApplication(sys.argv[:1])
    view = QWebEngineView()
    view.setPage(Page(view))
    view.resize(words.width, words.height)
    view.show()

    def finish(result):
        if words.picture:
            view.grab().save(words.picture)
        print(json.dumps({"logged": logged, "result": json.loads(result or "null")}))
        app.quit()

    def ask(loaded):
        logged.extend([] if loaded else ["the page did not load"])
        # after a moment, in which what the script did is drawn
        view.page().runJavaScript(
            # Qt hands on neither arrays nor objects
            f"JSON.stringify(({sys.stdin.read()}))",
            lambda result: QTimer.singleShot(300, lambda: finish(result)),
        )

    view.loadFinished.connect(ask)
    view.load(QUrl.fromLocalFile(str(Path(words.page).resolve())))
    app.exec()


if __name__ == "__main__":
    main()
