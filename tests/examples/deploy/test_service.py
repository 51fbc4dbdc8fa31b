"""The labeling app as a service: its units, the proxy in front of it, backups, logs, canaries."""

import configparser
import fcntl
import grp
import os
import re
import shlex
import shutil
import sqlite3
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import closing
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlencode

import pytest
import yaml

from rlhf.cli import main
from tests.examples.deploy.serving import DEPLOY, label_database, running
from tests.servers.commands import REPOSITORY, free_port
from tests.servers.local import LocalServer

UNITS = ("rlhf-label.service", "rlhf-backup.service", "rlhf-backup.timer")
RLHF, BACKUP, CURRENT = "/opt/rlhf/current/bin/rlhf", "/opt/rlhf/backup.sh", "/opt/rlhf/current"
PASSWORD = "long enough"
NGINX = """
user {user};
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/site.conf;
}}
"""


def unit(name: str) -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str
    parsed.read(DEPLOY / name)
    return parsed


def require_command(words: list[str]) -> None:
    """The words of an rlhf command are known to it."""
    assert main([*words, "--dry-run"]) == 0, words


def test_the_units_are_what_systemd_reads(tmp_path: Path) -> None:
    service = unit("rlhf-label.service")["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program == RLHF
    require_command(words)
    assert str(Path(words[2]).parent) == service["ReadWritePaths"] == service["WorkingDirectory"]
    script, database, folder = shlex.split(unit("rlhf-backup.service")["Service"]["ExecStart"])
    assert (script, database) == (BACKUP, words[2])
    assert folder in unit("rlhf-backup.service")["Service"]["ReadWritePaths"].split()
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    for name in UNITS:  # it looks for the programs: name some that are here
        text = (DEPLOY / name).read_text().replace(RLHF, sys.executable)
        (tmp_path / name).write_text(text.replace(BACKUP, str(DEPLOY / "backup.sh")))
    places = [str(tmp_path / name) for name in UNITS]
    verify = ["systemd-analyze", "verify", "--man=no", *places]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_canary_runs_every_night() -> None:
    job = yaml.safe_load((DEPLOY / "canary.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "CronJob")
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] in ("Never", "OnFailure")  # a job's may not be Always
    [container] = pod["containers"]
    assert container["command"] == ["rlhf"]
    require_command(container["args"])
    assert int(container["args"][-1]) == container["resources"]["limits"]["nvidia.com/gpu"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    lines = (DEPLOY / "canary.cron").read_text().splitlines()
    [line] = [one for one in lines if RLHF in one]
    schedule, user, command = line.split()[:5], line.split()[5], line.split(maxsplit=6)[6]
    assert " ".join(schedule) == job["spec"]["schedule"]
    assert user == unit("rlhf-label.service")["Service"]["User"]
    assert "%" not in command  # cron would read a new line
    words = shlex.split(shlex.split(command)[-1].partition(" >")[0])
    require_command(words[words.index(RLHF) + 1 :])


def run_canary_of_cron(folder: Path, code: int, seconds: int = 0) -> tuple[int, str]:
    """Run cron's command with a program in the canary's place; exit code and what cron mails."""
    program = folder / "rlhf"
    program.write_text(f'#!/bin/sh\necho "device {code}"\nsleep {seconds}\nexit {code}\n')
    program.chmod(0o755)
    lines = (DEPLOY / "canary.cron").read_text().splitlines()
    [line] = [one for one in lines if RLHF in one]
    command = line.split(maxsplit=6)[6]
    limit = " 1 " if seconds else " 30m "
    places = (RLHF, program), ("/tmp/rlhf-canary", folder / "canary"), (" 30m ", limit)
    for ours, here in places:
        assert ours in command
        command = command.replace(ours, str(here))
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("flock") is None, reason="no flock")
def test_cron_mails_what_failed_and_nothing_else(tmp_path: Path) -> None:
    assert run_canary_of_cron(tmp_path, 0) == (0, "")
    said = "rlhf doctor --canary: exit code {} (124 or 137: stopped after 30 minutes)\ndevice {}\n"
    assert run_canary_of_cron(tmp_path, 3)[1] == said.format(3, 3)
    assert run_canary_of_cron(tmp_path, 0, seconds=60)[1] == said.format(124, 0)
    log = tmp_path / "canary.log"
    log.write_text("of the one that runs")
    with (tmp_path / "canary").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another canary runs
        assert run_canary_of_cron(tmp_path, 3) == (0, "")
    assert log.read_text() == "of the one that runs"


def test_logs_that_are_written_are_rotated() -> None:
    written = set(re.findall(r"_log (\S+);", (DEPLOY / "nginx.conf").read_text()))
    rotated = (DEPLOY / "logrotate.conf").read_text().partition("{")[0]
    assert written == set(re.findall(r"^(/\S+) (/\S+) ", rotated, re.MULTILINE)[0])


@pytest.mark.slow
def test_logrotate_reads_its_file_beside_that_of_nginx(tmp_path: Path) -> None:
    """Without changing anything (-d), with logs that are here and the group of this process."""
    program = shutil.which("logrotate") or "/usr/sbin/logrotate"
    if not Path(program).is_file():
        pytest.skip("no logrotate: run `make proxy`")
    group = grp.getgrgid(os.getgid()).gr_name
    sources = {"nginx": Path("/etc/logrotate.d/nginx"), "rlhf": DEPLOY / "logrotate.conf"}
    for name, source in sources.items():
        logs = tmp_path / "log" / name
        logs.mkdir(parents=True, mode=0o755)
        for log in ("access.log", "error.log"):
            (logs / log).write_text("one line\n")
        text = source.read_text()
        for ours, here in (
            ("/var/log/", f"{logs.parent}/"),
            ("0640 www-data adm", f"0640 {Path('/proc/self').owner()} {group}"),
        ):
            assert ours in text
            text = text.replace(ours, here)
        conf = tmp_path / "logrotate.d" / name
        conf.parent.mkdir(exist_ok=True)
        conf.write_text(text)
        conf.chmod(0o644)
    state = ["--state", str(tmp_path / "state")]
    debug = [program, "-d", "--force", *state, str(tmp_path / "logrotate.d")]
    done = subprocess.run(debug, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "error:" not in done.stderr
    assert done.stderr.count("log needs rotating") == 4


def test_the_page_names_every_file() -> None:
    page = (DEPLOY / "README.md").read_text(encoding="utf-8")
    assert not [path.name for path in DEPLOY.iterdir() if path.name not in page + "README.md"]


def test_a_backup_is_made_and_the_oldest_goes(tmp_path: Path) -> None:
    database = label_database(tmp_path / "labels.db")
    program, folder = tmp_path / "rlhf", tmp_path / "backups"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={REPOSITORY} {sys.executable} -m rlhf.cli "$@"\n')
    program.chmod(0o755)
    folder.mkdir()
    for day in (1, 2, 3):
        (folder / f"labels-2026010{day}T000000Z.db").touch()
    subprocess.run(
        [str(DEPLOY / "backup.sh"), str(database), str(folder)],
        env={**os.environ, "RLHF": str(program), "KEEP": "2"},
        check=True,
        capture_output=True,
    )
    kept, new = sorted(folder.iterdir())
    assert kept.name == "labels-20260103T000000Z.db"
    with sqlite3.connect(new) as copy:
        assert copy.execute("SELECT COUNT(*) FROM prompts").fetchone() == (3,)


class Recorder(BaseHTTPRequestHandler):
    """Remembers the headers of requests."""

    def do_GET(self) -> None:
        self.server.seen.append(self.headers)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def write_proxy(folder: Path, app_port: int) -> tuple[list[str], int, int]:
    """nginx with our configuration on free ports: its command, and its https and http ports."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    https, http = free_port(), free_port()
    site = (DEPLOY / "nginx.conf").read_text()
    for ours, theirs in {
        "listen 443 ssl": f"listen 127.0.0.1:{https} ssl",
        "listen 80": f"listen 127.0.0.1:{http}",
        "/etc/letsencrypt/live/label.example.org/fullchain.pem": str(certificate),
        "/etc/letsencrypt/live/label.example.org/privkey.pem": str(key),
        "/var/log/rlhf": str(folder),
        "label.example.org": "localhost",
        "127.0.0.1:7860": f"127.0.0.1:{app_port}",
    }.items():
        assert ours in site, ours
        site = site.replace(ours, theirs)
    (folder / "site.conf").write_text(site)
    user = Path("/proc/self").owner()
    (folder / "nginx.conf").write_text(NGINX.format(user=user, folder=folder))
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    return [program, "-c", str(folder / "nginx.conf"), "-g", "daemon off;"], https, http


@pytest.fixture
def nginx() -> None:
    if not (shutil.which("nginx") or Path("/usr/sbin/nginx").is_file()):
        pytest.skip("no nginx: run `make proxy`")


@pytest.mark.slow
@pytest.mark.usefixtures("nginx")
def test_what_a_client_claims_of_itself_never_reaches_the_app(tmp_path: Path) -> None:
    with LocalServer(Recorder) as app:
        app.seen = []
        command, https, http = write_proxy(tmp_path, app.server_port)
        url = f"https://localhost:{https}/"
        with running(command, url, dict(os.environ), tmp_path):
            context = ssl.create_default_context(cafile=str(tmp_path / "certificate.pem"))
            app.seen.clear()
            claims = {"X-Forwarded-For": "6.6.6.6", "X-Forwarded-Proto": "http"}
            request = urllib.request.Request(url, headers=claims)
            with urllib.request.urlopen(request, context=context) as answer:
                assert "max-age" in answer.headers["Strict-Transport-Security"]
            [headers] = app.seen
            assert headers.get_all("X-Forwarded-For") == ["127.0.0.1"]
            assert headers.get_all("X-Forwarded-Proto") == ["https"]
            assert headers["Host"] == f"localhost:{https}"
            with closing(HTTPConnection("127.0.0.1", http)) as plain:
                plain.request("GET", "/board", headers={"Host": "localhost"})
                with plain.getresponse() as moved:
                    assert moved.status == 301
                    assert moved.headers["Location"] == "https://localhost/board"


@pytest.mark.slow
@pytest.mark.usefixtures("nginx")
def test_people_sign_in_through_the_proxy(tmp_path: Path, monkeypatch) -> None:
    database = label_database(tmp_path / "labels.db")
    add = ["users", "add", "ann", "--db", str(database), "--password-stdin"]
    program = [sys.executable, "-m", "rlhf.cli"]
    home = {"cwd": REPOSITORY, "check": True, "text": True}
    subprocess.run([*program, *add], input=f"{PASSWORD}\n", **home)
    service = configparser.ConfigParser(strict=False, interpolation=None)
    service.read(DEPLOY / "rlhf-label.service")
    allowed = re.findall(r"^Environment=(FORWARDED_ALLOW_IPS)=(.+)$",
                         (DEPLOY / "rlhf-label.service").read_text(), re.MULTILINE)  # fmt: skip
    environment = {**os.environ, **dict(allowed)}
    port = free_port()
    words = shlex.split(unit("rlhf-label.service")["Service"]["ExecStart"])[1:]
    words = [str(database) if one.endswith(".db") else one for one in words]
    words[words.index("--port") + 1] = str(port)
    command, https, _ = write_proxy(tmp_path, port)
    own = f"http://127.0.0.1:{port}"
    with (
        running([*program, *words], f"{own}/healthz", environment, REPOSITORY),
        running(command, f"https://localhost:{https}/healthz", environment, tmp_path),
    ):
        cookie = sign_in(f"https://localhost:{https}", tmp_path / "certificate.pem")
        assert {"Secure", "HttpOnly"} <= set(cookie.split("; "))
        # a program that is not the proxy claims that its user came by https
        claims = {"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "https"}
        direct = HTTPConnection("127.0.0.1", port, source_address=("127.0.0.2", 0))
        body = urlencode({"name": "ann", "password": PASSWORD})
        with closing(direct) as other:
            other.request("POST", "/sign-in", body, claims)
            with other.getresponse() as answer:
                assert "Secure" not in answer.headers["Set-Cookie"].split("; ")


def sign_in(address: str, certificate: Path) -> str:
    """Sign in and open the board with the cookie; the cookie as it was set."""

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            return None

    context = ssl.create_default_context(cafile=str(certificate))
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), Stay())
    body = urlencode({"name": "ann", "password": PASSWORD}).encode()
    form = urllib.request.Request(f"{address}/sign-in", body, {"Origin": address})
    with pytest.raises(urllib.error.HTTPError) as sent:
        opener.open(form)
    assert (sent.value.code, sent.value.headers["Location"]) == (303, "/")
    sent.value.close()
    cookie: str = sent.value.headers["Set-Cookie"]
    board = urllib.request.Request(address, headers={"Cookie": cookie.partition(";")[0]})
    with opener.open(board) as page:
        assert page.status == 200
    return cookie
