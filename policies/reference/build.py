"""`rlhf reference`: store what the original model answers, with the log-prob of every token.

Prompts are cut into shards; every process of every job has its own, and a shard that is on disk is
never made again, so a killed run loses at most the shards in work. Each shard seeds its own
sampling: a resumed run, and any number of jobs or processes, store the same rows. The manifest
makes a store of the shards once all are there.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from policies.reference.prompts import cut_into_shards, load_prompts
from policies.reference.settings import ReferenceSettings
from policies.reference.store import settle_end_tokens
from policies.reference.summary import write_manifest
from policies.reference.writer import ShardWriter, load_models
from policies.rewards import describe_rewards
from policies.sampling.generate import encode_prompts
from rlhf.errors import InputError
from rlhf.modeling.chat_template import set_end_tokens
from rlhf.modeling.models import describe_for_all, load_config
from rlhf.modeling.readers import tokenizer_of
from rlhf.parallel.distributed import from_main, precision_of, start
from rlhf.parallel.sharding_choice import choose_sharding
from rlhf.planning.price import cost_of
from rlhf.planning.utilization import measure_rate
from rlhf.records.jsonl import write_json
from rlhf.records.schema import RankedPrompt
from rlhf.run.preflight import describe_process, require_agreement
from rlhf.run.rundir import RunDir, StageInputs, open_stage, stage_status, watching_stage
from rlhf.run.telemetry.job_clock import job_clock


def build_reference(settings: ReferenceSettings) -> dict[str, Any]:
    """Run the stage and return its manifest.

    Raises:
        InputError: prompts, model or reward model cannot be used, or --out is taken.
        MismatchError: a process has other packages or inputs than the first.
    """
    assert settings.prompts is not None
    assert settings.model is not None
    began = time.monotonic()
    sharding = choose_sharding(settings)
    accelerator = start(settings.precision, settings.seed)
    records, prompts_hash = load_prompts(settings.prompts)
    model_description = describe_for_all(settings.model, settings.chat_template_kwargs)
    tokenizer = tokenizer_of(model_description)
    prompts = [record.prompt for record in records]
    config = load_config(settings.model)
    _require_vocabulary(settings, int(config.get_text_config().vocab_size))
    encoded = encode_prompts(tokenizer, config, prompts, settings.sampling.max_new_tokens)
    inputs = _inputs(settings, prompts_hash, model_description)
    require_agreement(accelerator, describe_process(inputs))
    precision = precision_of(accelerator)
    # all jobs, and a resumed run, must use one precision, whatever their hardware supports
    settings = replace(
        settings, precision=precision, resume=settings.resume or settings.shard is not None
    )
    run = open_stage(settings.out, "reference", settings, inputs, resume=settings.resume)
    if from_main(run.is_done):
        return run.read_report()
    set_end_tokens(tokenizer, from_main(settle_end_tokens(run, tokenizer)))
    shards = cut_into_shards(records, settings.prompts_per_shard)
    stall_timeout, heartbeat = settings.parallel.stall_timeout, heartbeat_of(run, settings)
    ranks_synchronize = sharding.shards_weights or sharding.is_tensor_parallel
    with (
        job_clock(heartbeat) if settings.shard is not None else nullcontext(),
        stage_status(run, is_complete=run.report_json.is_file, alone=settings.shard is None),
        watching_stage(
            run, stall_timeout, heartbeat=heartbeat, ranks_synchronize=ranks_synchronize
        ),
    ):
        run.outputs.mkdir(exist_ok=True)
        rate = measure_rate(accelerator, run.speed_file)
        longest = max(map(len, encoded)) + settings.sampling.max_new_tokens
        models = load_models(settings, model_description, accelerator, sharding, longest)
        prompt_ids = dict(zip((prompt.id for prompt in prompts), encoded, strict=True))
        writer = ShardWriter(
            accelerator, sharding, models, tokenizer, settings, model_description, prompt_ids
        )
        writer.write_missing(shards, run.outputs)
        accelerator.wait_for_everyone()
        stored = from_main([name for name in shards if (run.outputs / name).is_file()])
        if len(stored) < len(shards):  # other jobs still write theirs
            accelerator.wait_for_everyone()
            return {"shards": {"stored": len(stored), "of": len(shards)}}
        _finish(writer, run, shards, inputs, rate, began)
        accelerator.wait_for_everyone()
    return run.read_report()


def _inputs(
    settings: ReferenceSettings, prompts_hash: str, model: dict[str, str]
) -> dict[str, dict[str, str]]:
    inputs = {"prompts": {"path": str(settings.prompts), "hash": prompts_hash}, "model": model}
    if settings.reward is not None:
        inputs |= describe_rewards([settings.reward], model)
    return inputs


def _finish(
    writer: ShardWriter,
    run: RunDir,
    shards: dict[str, Sequence[RankedPrompt]],
    inputs: StageInputs,
    rate: float,
    began: float,
) -> None:
    """Write the manifest, which makes the store complete, and the report."""
    settings, phases = writer.settings, writer.clock.phases(writer.accelerator, rate)
    if not writer.accelerator.is_main_process:
        return
    facts = writer.facts(inputs["prompts"]["hash"], inputs.get("reward"))
    manifest = write_manifest(run.outputs, shards, facts, settings.sampling.samples)
    seconds, cost = round(time.monotonic() - began, 1), cost_of(run, settings.price_per_hour)
    report = {**manifest, "shards": len(shards), "seconds": seconds, "cost": cost}
    if phases["rows"] == manifest["rows"]:  # all were written now, each by one process
        report |= {"phases": phases, "amount": forecast_amount(writer, shards, manifest)}
    write_json(run.report_json, report)


def forecast_amount(
    writer: ShardWriter, shards: dict[str, Sequence[RankedPrompt]], manifest: dict[str, Any]
) -> dict[str, Any]:
    """The amount that the run read and wrote, for forecasts: `rlhf.planning.forecast.Amount`."""
    splits = [record.prompt.split for records in shards.values() for record in records]
    return {
        "prompts": splits.count("train"),
        "held_out": len(splits) - splits.count("train"),
        "samples": manifest["samples_per_prompt"],
        "prompt_tokens": fmean(map(len, writer.prompt_ids.values())),
        "response_tokens": manifest["mean_length"],
    }


def heartbeat_of(run: RunDir, settings: ReferenceSettings) -> Path:
    """The heartbeat of this job's ranks; several jobs may fill one store."""
    return run.heartbeat if settings.shard is None else run.heartbeat / f"job-{settings.part[0]}"


def _require_vocabulary(settings: ReferenceSettings, tokens: int) -> None:
    if settings.store_top_k is not None and settings.store_top_k > tokens:
        raise InputError(
            f"--store-top-k is {settings.store_top_k}, and the vocabulary of {settings.model} has "
            f"only {tokens} tokens",
            "Give a smaller number; 32 is usual.",
        )
