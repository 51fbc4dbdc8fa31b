"""What `rlhf serve --policy` is made of: model servers, the proxy before them, the database."""

import json
import shlex
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from labeling_app.db.people.users import programs_with_tokens
from labeling_app.db.store import Store
from labeling_app.web.health import require_undamaged
from labeling_app.web.http_server import serve_app
from labeling_app.web.programs.served import ServedRecords
from policies.serving.access import Access
from policies.serving.app import build_app
from policies.serving.following import PromotionFollower, Start
from policies.serving.proxy import MODEL, Policies, Proxy, ServedPolicy
from policies.serving.retention import Retention
from policies.serving.servers.engine import EngineProcess, engine_command
from policies.serving.servers.upstream import Upstream
from policies.serving.settings import read_share
from policies.serving.split import Split
from rlhf.commands.models.serve import Settings
from rlhf.endpoints.chat_completions import key_header
from rlhf.endpoints.signals import load_redaction
from rlhf.endpoints.urls import (
    LOOPBACK,
    http_address,
    listen,
    open_url,
    read_answer,
    require_free_port,
)
from rlhf.errors import InputError
from rlhf.records.served import Variant
from rlhf.run.loops.promotion import is_loop

if TYPE_CHECKING:
    from policies.serving.servers.best_of import BestOf

ENDPOINT_KEY = "RLHF_SERVE_API_KEY"
LISTED = 5


def serve_policies(settings: Settings) -> dict[str, Any]:
    """Serve until SIGTERM or SIGINT.

    Raises:
        InputError: a model, function or address cannot be used, or nobody has a token.
    """
    with ExitStack() as stack:
        require_free_port(settings.host, settings.port)
        redact = load_redaction(settings.keep.redact) if settings.keep.redact else None
        records = None
        if settings.db is not None:
            store = stack.enter_context(Store(settings.db))
            _require_usable(store, settings)
            records = ServedRecords(store)
        best_of = _best_of(settings)
        share = read_share(settings.share, "--share") if settings.compares else 0.0

        def start_comparison(policies: Mapping[Variant, ServedPolicy]) -> int | None:
            if records is None or not settings.compares:
                return None
            names = {variant: policy.description["path"] for variant, policy in policies.items()}
            return records.start_comparison(names, share)

        servers = stack.enter_context(_servers(settings))
        retention = None
        if records is not None:
            retention = Retention(
                records=records,
                share=read_share(settings.keep.share, "--keep.share"),
                days=settings.keep.days,
                redact=redact,
                comparison=start_comparison(servers.by_variant),
            )
        policies = Policies(by_variant=servers.by_variant, split=Split(share), retention=retention)
        proxy = Proxy(policies, best_of, settings.silence_seconds)
        followers = _followers(settings, servers, start_comparison)
        app = build_app(proxy, Access(settings.host, records), servers.engines, followers)
        listening = listen(settings.host, settings.port)
        _print_address(settings)
        serve_app(app, listening)
    counts = vars(proxy.counts)
    return {**counts, "requests": sum(proxy.counts.requests.values())}


def engine_commands(settings: Settings) -> list[str]:
    """The command lines of the model servers that are started, with PORT for a free one.

    Raises:
        InputError: a policy is a run that did not finish, or of another stage.
    """
    from rlhf.modeling.models import policy_folder
    from rlhf.modeling.readers import kwargs_for, used_kwargs

    given, lines = settings.chat_template_kwargs, []
    for variant, (name, endpoint) in _wanted(settings).items():
        if endpoint is None:
            assert name is not None  # checked by the settings
            folder = policy_folder(name, f"--{variant}")
            is_there = Path(folder).is_dir()  # a model of the hub is not looked up
            kwargs = used_kwargs(folder, kwargs_for(folder, given)) if is_there else given
            command = engine_command(settings.engine, folder, 0, kwargs, settings.engine_flags)
            lines.append(shlex.join(command).replace("--port 0", "--port PORT"))
    return lines


def _wanted(settings: Settings) -> dict[Variant, tuple[str | None, str | None]]:
    """The name and the address of every policy."""
    wanted: dict[Variant, tuple[str | None, str | None]] = {
        "policy": (settings.policy, settings.endpoint)
    }
    if settings.compares:
        wanted["against"] = (settings.against, settings.against_endpoint)
    return wanted


@dataclass
class _Servers:
    """The policies, the model servers that are running, and by policy the folder and its server."""

    by_variant: dict[Variant, ServedPolicy] = field(default_factory=dict)
    engines: list[EngineProcess] = field(default_factory=list)
    started: dict[Variant, tuple[str, EngineProcess]] = field(default_factory=dict)


@contextmanager
def _servers(settings: Settings) -> Iterator[_Servers]:
    """The policies, ready to answer; servers that were started are ended with the block."""
    servers = _Servers()
    try:
        for variant, (name, endpoint) in _wanted(settings).items():
            if endpoint is not None:
                servers.by_variant[variant] = _policy_at(endpoint.rstrip("/"), name)
                continue
            from rlhf.modeling.models import policy_folder

            assert name is not None  # checked by the settings
            folder = policy_folder(name, f"--{variant}")
            servers.by_variant[variant], engine = _prepare(settings, folder)()
            servers.engines.append(engine)
            servers.started[variant] = folder, engine
        for engine in servers.engines:
            engine.wait_until_ready()
        yield servers
    finally:
        for engine in servers.engines:
            engine.stop()


def _prepare(settings: Settings, folder: str) -> Start:
    """Read a policy, and return what starts its server."""
    from rlhf.modeling.models import describe_model
    from rlhf.modeling.readers import described_kwargs, kwargs_for

    description = describe_model(folder, kwargs_for(folder, settings.chat_template_kwargs))
    kwargs = described_kwargs(description)
    named = {"path": f"{folder} ({description['hash'][:12]})", "hash": description["hash"]}

    def start() -> tuple[ServedPolicy, EngineProcess]:
        sys.stderr.write(f"Starting {settings.engine} serve {folder} …\n")
        engine = EngineProcess(
            lambda port: engine_command(
                settings.engine, folder, port, kwargs, settings.engine_flags
            )
        )
        upstream = Upstream(url=engine.url, model=folder, headers={})
        return ServedPolicy(description=named, upstream=upstream), engine

    return start


def _followers(
    settings: Settings,
    servers: _Servers,
    start_comparison: Callable[[Mapping[Variant, ServedPolicy]], int | None],
) -> list[PromotionFollower]:
    """Followers that change the policies of loops with their promotions."""
    names: dict[Variant, str | None] = {"policy": settings.policy, "against": settings.against}
    return [
        PromotionFollower(
            out=Path(name),
            variant=variant,
            name=folder,
            engine=engine,
            engines=servers.engines,
            prepare=lambda folder: _prepare(settings, folder),
            start_comparison=start_comparison,
        )
        for variant, (folder, engine) in servers.started.items()
        if (name := names[variant]) is not None and is_loop(Path(name))
    ]


def _policy_at(url: str, name: str | None) -> ServedPolicy:
    """A policy on a server that runs already."""
    headers = key_header(ENDPOINT_KEY)
    model = name or _only_model(url, headers)
    upstream = Upstream(url=url, model=model, headers=headers)
    return ServedPolicy(description={"path": f"{model} at {url}"}, upstream=upstream)


def _only_model(url: str, headers: Mapping[str, str]) -> str:
    """The one model that a server serves.

    Raises:
        InputError: it cannot be asked, or serves none or several.
    """
    request = urllib.request.Request(f"{url}/models", headers=dict(headers))
    try:
        with open_url(request, timeout_seconds=10) as answer:
            names = [str(model["id"]) for model in json.loads(read_answer(answer))["data"]]
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{url}/models does not list its models ({error})",
            "Start the server, check --endpoint (it ends in /v1), or name the model: --policy NAME",
        ) from None
    if len(names) != 1:
        raise InputError(
            f"{url} serves {len(names)} models: {', '.join(names[:LISTED])}",
            f"Choose: --policy {names[0] if names else 'NAME'} (or --against, of the second one).",
        )
    return names[0]


def _best_of(settings: Settings) -> "BestOf | None":
    if settings.best_of is None or settings.reward is None:
        return None
    from policies.serving.servers.best_of import BestOf
    from reward.serving.serve import load_batches

    kwargs = settings.chat_template_kwargs
    return BestOf(settings.best_of, load_batches(settings.reward, settings.scoring, kwargs))


def _require_usable(store: Store, settings: Settings) -> None:
    require_undamaged(store.connections)
    if settings.host not in LOOPBACK and not programs_with_tokens(store.connections):
        raise InputError(
            f"--host is {settings.host}, which other machines can reach, and nobody has a token",
            f"Make one: rlhf users token NAME --db {settings.db}",
        )


def _print_address(settings: Settings) -> None:
    address = http_address(settings.host, settings.port)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(
        f"OpenAI clients: base_url=[bold]{escape(address)}/v1[/], model={MODEL!r}  (Ctrl+C stops)"
    )
    if settings.db is not None:
        console.print(f"Feedback: POST {escape(address)}/feedback")
    if settings.host not in LOOPBACK:
        console.print(
            "Tokens and texts are sent unencrypted: on an open network put an https proxy in front."
        )
