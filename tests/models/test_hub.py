"""A model of the hub, by the hub's own client, from a hub on this machine."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

import mlx_kvcache.models as models
from mlx_kvcache.errors import ModelNotFoundError
from tests.support.gguf_files import Tiny, write

pytestmark = pytest.mark.slow

COMMITS = {"main": "a" * 40, "v2": "b" * 40}


class Hub(BaseHTTPRequestHandler):
    """Serves the directory of each revision as the repository org/model."""

    def __init__(self, revisions: dict[str, Path], *arguments: object) -> None:
        self.revisions = revisions
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        for revision, directory in self.revisions.items():
            commit = COMMITS[revision]
            if path == f"/api/models/org/model/revision/{revision}":
                files = [{"rfilename": each.name} for each in sorted(directory.iterdir())]
                facts = {"id": "org/model", "sha": commit, "siblings": files}
                return self.send(json.dumps(facts).encode(), {}, body)
            if path == f"/api/models/org/model/tree/{commit}":
                tree = [
                    {
                        "type": "file",
                        "path": each.name,
                        "size": each.stat().st_size,
                        "oid": "0" * 40,
                    }
                    for each in sorted(directory.iterdir())
                ]
                return self.send(json.dumps(tree).encode(), {}, body)
            if path.startswith(f"/org/model/resolve/{commit}/"):
                data = (directory / path.rpartition("/")[2]).read_bytes()
                tag = hashlib.sha1(data).hexdigest()
                return self.send(data, {"ETag": f'"{tag}"', "X-Repo-Commit": commit}, body)
        self.send_error(404)
        return None

    def send(self, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing to stderr."""


@pytest.fixture
def hub(
    tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Path]]:
    revisions = {}
    for seed, revision in enumerate(COMMITS):
        file = write(tmp_path / f"{revision}.gguf", Tiny("llama", seed=seed))
        revisions[revision] = Path(shutil.copytree(models.resolve(file), tmp_path / revision))
    assert cache_home.is_dir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, revisions))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    constants = huggingface_hub.constants
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    yield revisions
    server.shutdown()
    server.server_close()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_revision_is_downloaded_and_loaded(
    hub: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    for revision, directory in hub.items():
        local = models.resolve("org/model", revision=revision)
        assert local.name == COMMITS[revision]
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            assert (local / name).read_bytes() == (directory / name).read_bytes()
    assert models.resolve("org/model").name == COMMITS["main"]
    model, _ = models.load("org/model", revision="v2")
    assert len(model.layers) == 3
    # Nothing on a pipe, bars or lines.
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ModelNotFoundError, match="at revision 'v3'"):
        models.resolve("org/model", revision="v3")


@pytest.mark.usefixtures("hub")
def test_a_download_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    models.resolve("org/model")
    assert "Fetching" in stderr.getvalue()
    assert "100%" in stderr.getvalue()
