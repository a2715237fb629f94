"""Credentials get nowhere: not into output, logs, errors with their tracebacks, nor the store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import run_code
from remotes import OUTSIDE, SlowServer, s3_server
from stores import Made

CANARIES = [f"canary{i:02d}secret" for i in range(20)]

# Does everything that can be done with a store, the ways it can fail included; what a user would
# see of it goes to stdout and stderr, logs at DEBUG and whole tracebacks included.
SCRIPT = """
import logging, os, sys, traceback
from typer.testing import CliRunner

logging.basicConfig(level=logging.DEBUG)
for name in ("s3fs", "fsspec", "botocore", "aiobotocore", "asyncio", "aiohttp", "urllib3"):
    logging.getLogger(name).setLevel(logging.WARNING)  # their own, off unless somebody asks

from fsspec.config import conf, set_conf_files
from s3fs import S3FileSystem
from bertvision.cli import app
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.stream import ActivationLoader

set_conf_files(os.environ["FSSPEC_CONFIG_DIR"], conf)  # as at its import
S3FileSystem.retries = 1
canary = CANARIES.__getitem__

def attempt(url, *commands, **environment):
    os.environ.update(environment)
    S3FileSystem.clear_instance_cache()
    print("==", environment.keys())
    for command in commands:
        done = CliRunner().invoke(app, ["store", *command.split(), "--store", url, "--json"])
        print(done.output, done.exception if done.exit_code not in (0, 1, 2) else "")
    try:
        store = ActivationStore.open(url)
        print(repr(store), repr(store.storage), repr(store["1e"]["train"]))
        for batch in ActivationLoader(store["1e"]["train"]):
            pass
        with store.storage.lock("ledger/.lock", "writing"):
            store.storage.write("f", b"1")
    except Exception as error:
        traceback.print_exc()
        seen.append(type(error).__name__)

seen = []
working = os.environ["AWS_ENDPOINT_URL"]
attempt("s3://bucket/whole", "ls", "info 1e/train", "verify")
attempt("s3://bucket/damaged", "ls", "info 1e/train", "verify")
attempt("s3://nobucket/store", "ls")
attempt("s3://bucket/whole", AWS_ENDPOINT_URL=working.replace("//", f"//{canary(5)}:{canary(6)}@"))
gone = f"http://{canary(7)}:{canary(8)}@127.0.0.1:9"
attempt("s3://bucket/whole", "ls", AWS_ENDPOINT_URL=gone)
attempt("s3://bucket/whole", AWS_ENDPOINT_URL=DENYING)
attempt(DENYING + "/store", "ls")
attempt("s3://bucket/whole", AWS_ENDPOINT_URL=f"nothing://{canary(9)}")
attempt("s3://bucket/whole", AWS_ENDPOINT_URL=working, AWS_PROFILE=canary(10))
del os.environ["AWS_PROFILE"]
attempt(f"s3://{canary(11)}:{canary(12)}@bucket/whole")
attempt(f"https://{canary(13)}@127.0.0.1:9/store", "ls")
attempt(f"https://127.0.0.1:9/store?X-Amz-Signature={canary(14)}&token={canary(15)}")
attempt(f"https://127.0.0.1:9/store#{canary(16)}")
attempt(f"abfs://{canary(17)}:{canary(18)}@host/store")
print("SEEN", ",".join(seen))
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Output of the script, and all objects of the bucket afterwards."""
    if OUTSIDE:
        pytest.skip("the credentials are those of the server that the tests make")
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    folder = tmp_path_factory.mktemp("secrets")
    (folder / "fsspec").mkdir()
    headers = {"Authorization": f"Bearer {CANARIES[3]}"}
    configured = {"http": {"headers": headers}, "gcs": {"token": CANARIES[4]}}
    (folder / "fsspec/conf.json").write_text(json.dumps(configured))
    denying = SlowServer(folder)
    denying.status, denying.body = 403, f"<Error>{CANARIES[19]}</Error>".encode()
    environment = {
        "AWS_ACCESS_KEY_ID": CANARIES[0],
        "AWS_SECRET_ACCESS_KEY": CANARIES[1],
        "AWS_SESSION_TOKEN": CANARIES[2],
        "FSSPEC_CONFIG_DIR": str(folder / "fsspec"),
    }
    with s3_server(**environment), denying.running():
        for name in ("whole", "damaged"):
            split = Made([5, 9, 30, 40, 33], encoding="int8").write(f"s3://bucket/{name}")
        key = "arrays.zarr/1e/train/hidden_states/c/1/0/0"
        split.storage.write(key, bytes(len(split.storage.read(key))))
        script = f"CANARIES = {CANARIES}\nDENYING = {denying.url!r}\n{SCRIPT}"
        done = run_code(script, NO_COLOR="1")
        assert done.returncode == 0, done.stderr
        bucket = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets["bucket"]
        yield done.stdout + done.stderr, {key: bucket.keys[key].value for key in bucket.keys}


def test_the_script_met_every_kind_of_error(output: tuple[str, dict[str, bytes]]) -> None:
    text, _ = output
    (seen,) = [line for line in text.splitlines() if line.startswith("SEEN")]
    assert seen.count("CorruptStoreError") == 1
    assert seen.count("InputError") == 5
    for message in (
        *("whole", "does not pass its checksum", "no such bucket", "cannot be reached"),
        *("not allowed", "holds a user name, a password or a query"),
    ):
        assert message in text
    assert "Unclosed" not in text


@pytest.mark.parametrize("canary", CANARIES)
def test_no_secret_gets_out(output: tuple[str, dict[str, bytes]], canary: str) -> None:
    text, objects = output
    assert canary not in text, [line for line in text.splitlines() if canary in line][:3]
    assert len(objects) > 20
    assert not [key for key, data in objects.items() if canary.encode() in data]


def test_no_secret_is_kept_in_a_workspace(tmp_path: Path) -> None:
    from bertvision.errors import InputError
    from bertvision.pipelines.tasks.data import TaskConfig
    from bertvision.pipelines.workspace.config import FinetuneConfig, ModelConfig, WorkspaceConfig
    from bertvision.pipelines.workspace.workspace import Workspace

    model = ModelConfig(name_or_path="b", weights_sha256="0", hidden_size=4, num_hidden_layers=1)
    config = WorkspaceConfig(model=model, task=TaskConfig(), data={}, finetune=FinetuneConfig())
    space = Workspace.create(tmp_path / "space", config)
    before = (space.root / "bertvision.yaml").read_bytes()
    with pytest.raises(InputError) as raised:
        space.keep_at(f"s3://{CANARIES[0]}:{CANARIES[1]}@bucket/store")
    assert "canary" not in str(raised.value)
    assert (space.root / "bertvision.yaml").read_bytes() == before
