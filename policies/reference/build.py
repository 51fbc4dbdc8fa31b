"""`rlhf reference`: store what the original model answers, with the log-prob of every token.

Prompts are cut into shards; every process of every job has its own, and a shard that is on disk is
never made again, so a killed run loses at most the shards in work. Each shard seeds its own
sampling: a resumed run, and any number of jobs or processes, store the same rows. The manifest
makes a store of the shards once all are there.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from numpy import ndarray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policies.reference.settings import ReferenceSettings
from policies.reference.shards import ReferenceRow, TopTokens, shard_name, write_shard
from policies.reference.store import settle_end_tokens
from policies.reference.summary import write_manifest
from policies.rewards import Reward, describe_rewards, load_reward
from policies.sampling.generate import Sample, cut, encode_prompts, sample_responses
from rlhf.config import Precision
from rlhf.errors import InputError
from rlhf.modeling.chat_template import END_TOKENS, end_token_ids, set_end_tokens
from rlhf.modeling.log_probs import (
    SCORE_BATCH,
    Sequences,
    batches_by_length,
    reference_log_probs,
)
from rlhf.modeling.models import describe_model, load_causal_lm, load_config
from rlhf.modeling.readers import described_kwargs, tokenizer_of
from rlhf.modeling.tokens import decode_response
from rlhf.parallel.distributed import from_main, global_max, seed_all, start
from rlhf.parallel.gathered_model import GatheredModel
from rlhf.parallel.sharding import Sharding, shard_frozen
from rlhf.parallel.sharding_choice import choose_sharding
from rlhf.records.fingerprints import file_hash
from rlhf.records.jsonl import BadLineError, JsonObject, parse_line, read_lines, write_json
from rlhf.records.ranked import SPLITS, read_manifest, read_ranked
from rlhf.records.schema import Prompt, RankedPrompt, Response, Sampling
from rlhf.run.metrics import progress
from rlhf.run.rundir import RunDir, open_stage, stage_status, watching_stage
from rlhf.run.watchdog import beat

SHARD_SEED_STRIDE = 1_000_003


def build_reference(settings: ReferenceSettings) -> dict[str, Any]:
    """Run the stage and return its manifest.

    Raises:
        InputError: prompts, model or reward model cannot be used, or --out is taken.
    """
    assert settings.prompts is not None
    assert settings.model is not None
    began = time.monotonic()
    records, prompts_hash = load_prompts(settings.prompts)
    model_description = describe_model(settings.model, settings.chat_template_kwargs)
    tokenizer = tokenizer_of(model_description)
    prompts = [record.prompt for record in records]
    config = load_config(settings.model)
    _require_vocabulary(settings, int(config.get_text_config().vocab_size))
    encoded = encode_prompts(tokenizer, config, prompts, settings.max_new_tokens)
    inputs = {
        "prompts": {"path": str(settings.prompts), "hash": prompts_hash},
        "model": model_description,
    }
    if settings.reward is not None:
        inputs |= describe_rewards([settings.reward], model_description)
    sharding = choose_sharding(settings)
    accelerator = start(settings.precision, settings.seed)
    precision: Precision = "bf16" if accelerator.mixed_precision == "bf16" else "fp32"
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
    with (
        stage_status(run, is_complete=run.report_json.is_file, alone=settings.shard is None),
        watching_stage(run, stall_timeout, heartbeat=heartbeat),
    ):
        run.outputs.mkdir(exist_ok=True)
        models = _load_models(settings, model_description, accelerator, sharding)
        prompt_ids = dict(zip((prompt.id for prompt in prompts), encoded, strict=True))
        writer = _ShardWriter(
            accelerator, sharding, models, tokenizer, settings, model_description, prompt_ids
        )
        writer.write_missing(shards, run.outputs)
        accelerator.wait_for_everyone()
        stored = from_main([name for name in shards if (run.outputs / name).is_file()])
        if len(stored) < len(shards):  # other jobs have yet to write theirs
            accelerator.wait_for_everyone()
            return {"shards": {"stored": len(stored), "of": len(shards)}}
        if accelerator.is_main_process:
            facts = writer.facts(prompts_hash, inputs.get("reward"))
            manifest = write_manifest(run.outputs, shards, facts, settings.samples)
            seconds = round(time.monotonic() - began, 1)
            write_json(run.report_json, {**manifest, "shards": len(shards), "seconds": seconds})
        accelerator.wait_for_everyone()
    return run.read_report()


def heartbeat_of(run: RunDir, settings: ReferenceSettings) -> Path:
    """The heartbeat of this job's ranks; several jobs may fill one store."""
    return run.heartbeat if settings.shard is None else run.heartbeat / f"job-{settings.part[0]}"


def _require_vocabulary(settings: ReferenceSettings, tokens: int) -> None:
    if settings.store_top_k > tokens:
        raise InputError(
            f"--store-top-k is {settings.store_top_k}, and {settings.model} knows {tokens} tokens",
            "Give at most so many; 32 is a usual number.",
        )


def load_prompts(path: Path) -> tuple[list[RankedPrompt], str]:
    """Prompts of an export with their responses, or of a plain JSON Lines file; and their hash.

    A prompt that a file has twice counts once.

    Raises:
        InputError: the path does not exist, a line is malformed, two prompts have one id, or there
            is no prompt.
    """
    if path.is_dir():
        records = read_ranked(path)
        content_hash = str(read_manifest(path)["content_hash"])
    else:
        records = _plain_prompts(path)
        content_hash = file_hash(path)
    if not records:
        raise InputError(f"{path} holds no prompts", "Import some: rlhf import FILE --db DB")
    return records, content_hash


def cut_into_shards(
    records: Sequence[RankedPrompt], size: int
) -> dict[str, Sequence[RankedPrompt]]:
    """The prompts of every Parquet file, by its name; a file has prompts of one split only."""
    shards: dict[str, Sequence[RankedPrompt]] = {}
    for split in SPLITS:
        mine = [record for record in records if record.prompt.split == split]
        for number, first in enumerate(range(0, len(mine), size)):
            shards[shard_name(split, number)] = mine[first : first + size]
    return shards


def shards_of_rank(
    names: Sequence[str], settings: ReferenceSettings, accelerator: Accelerator
) -> Sequence[str]:
    """The shards of this rank: every n-th (n ranks) of its job's, every N-th (N jobs) of all."""
    job, jobs = settings.part
    if settings.parallel.tensor_parallel > 1:  # all ranks work on every shard
        return names[job::jobs]
    return names[job::jobs][accelerator.process_index :: accelerator.num_processes]


def writes(accelerator: Accelerator, sharding: Sharding) -> bool:
    """Whether this rank writes shards: under tensor parallelism only the main rank does."""
    return accelerator.is_main_process or not sharding.is_tensor_parallel


def _plain_prompts(path: Path) -> list[RankedPrompt]:
    records: dict[str, RankedPrompt] = {}
    for place, line in read_lines(path):
        record = _plain_prompt(parse_line(line, place), place)
        before = records.setdefault(record.prompt.id, record).prompt
        if (before.messages, before.split) != (record.prompt.messages, record.prompt.split):
            raise BadLineError(
                f"{place}: the prompt {before.id!r} came before with other words or another split",
                "Give every prompt an id of its own, or none, for it then follows from the words; "
                "and leave what is to be held out out of the other split.",
            )
    return list(records.values())


def _plain_prompt(value: JsonObject, place: str) -> RankedPrompt:
    messages = value.get("messages", [{"role": "user", "content": value.get("prompt", "")}])
    try:
        prompt = Prompt.from_json({**value, "messages": messages})
    except InputError as error:
        raise BadLineError(f"{place}: {error.problem}", error.remedy) from None
    return RankedPrompt(prompt=prompt, responses=(), rankings=())


@dataclass(frozen=True)
class _Models:
    """The models; `gathered_model` has all weights of `original` where it is sharded."""

    original: PreTrainedModel
    gathered_model: GatheredModel
    reward: Reward | None


def _load_models(
    settings: ReferenceSettings,
    description: dict[str, str],
    accelerator: Accelerator,
    sharding: Sharding,
) -> _Models:
    model = load_causal_lm(description["path"], tensor_parallel=sharding.is_tensor_parallel).eval()
    gathered_model = GatheredModel(model, accelerator.device, sharding)
    shard_frozen(accelerator, model, sharding, exact=True)
    if settings.reward is None:
        return _Models(model, gathered_model, None)
    given = described_kwargs(description)
    reward = load_reward([settings.reward], accelerator, sharding=sharding, given=given)
    return _Models(model, gathered_model, reward)


@dataclass(frozen=True)
class _ShardWriter:
    """Models and settings that turn prompts into rows.

    Where weights are sharded, all processes work in lockstep: each writes a shard at a time, all
    gather the model once to sample for it, and those that have none left only take part.
    """

    accelerator: Accelerator
    sharding: Sharding
    models: _Models
    tokenizer: PreTrainedTokenizerBase
    settings: ReferenceSettings
    description: dict[str, str]
    prompt_ids: dict[str, list[int]]

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.settings.temperature,
            max_new_tokens=self.settings.max_new_tokens,
            seed=self.settings.seed,
        )

    def facts(self, prompts_hash: str, reward: dict[str, str] | None) -> dict[str, Any]:
        """The manifest fields that describe how the rows were made."""
        return {
            "model": self.description,
            "prompts_hash": prompts_hash,
            "reward": reward,
            "sampling": asdict(self.sampling),
            END_TOKENS: list(end_token_ids(self.tokenizer)),
            "stored_top_k": self.settings.store_top_k,
            "precision": self.settings.precision,
            "attention": str(self.models.original.config._attn_implementation),
        }

    def write_missing(self, shards: dict[str, Sequence[RankedPrompt]], folder: Path) -> None:
        """Write every shard of this process that is not on disk yet."""
        mine = shards_of_rank(list(shards), self.settings, self.accelerator)
        missing = [name for name in mine if not (folder / name).is_file()]
        if self.sharding.is_tensor_parallel:
            missing = from_main(missing)
        places = {name: place for place, name in enumerate(shards, start=1)}
        judge = self.models.reward
        reward = None if judge is None else judge.description["hash"]
        sizes = {name: len(shards[name]) * self.settings.samples for name in mine}
        total, lacking = sum(sizes.values()), sum(sizes[name] for name in missing)
        turns = self.sharding.in_step(self.accelerator, missing, list(shards)[:1])
        with progress("reference outputs", total=total, done=total - lacking) as bar:
            for turn, name in enumerate(turns):
                if turn >= len(missing):
                    self._take_part(shards[name][0].prompt)
                    continue
                seed_all(self.settings.seed + SHARD_SEED_STRIDE * places[name])
                rows = self._rows(shards[name], bar.advance)
                if writes(self.accelerator, self.sharding):
                    write_shard(folder / name, rows, reward)

    def _take_part(self, prompt: Prompt) -> None:
        """Take part in gathering the weights while other ranks write shards."""
        beat("waiting for others")
        self._sample([], lambda count: None)
        nothing = Sample([end_token_ids(self.tokenizer)[0]], finished=True)
        self._score([prompt], [self.prompt_ids[prompt.id]], [nothing])

    def _rows(
        self, records: Sequence[RankedPrompt], advance: Callable[[int], None]
    ) -> list[ReferenceRow]:
        prompts = [record.prompt for record in records]
        encoded = [self.prompt_ids[prompt.id] for prompt in prompts]
        reused = [self._reusable(record) for record in records]
        slots = [(p, i) for p in range(len(records)) for i in range(self.settings.samples)]
        missing = [(p, i) for p, i in slots if i >= len(reused[p])]
        advance(len(slots) - len(missing))
        sampled = self._sample([encoded[p] for p, _ in missing], advance)
        fresh = dict(zip(missing, sampled, strict=True))
        chosen = [fresh[slot] if slot in fresh else reused[slot[0]][slot[1]] for slot in slots]
        scored = self._score([prompts[p] for p, _ in slots], [encoded[p] for p, _ in slots], chosen)
        return [
            ReferenceRow(
                prompt=prompts[p],
                sample_index=i,
                prompt_ids=encoded[p],
                response_ids=sample.token_ids,
                text=decode_response(self.tokenizer, sample.token_ids, encoded[p]),
                finished=sample.finished,
                reused=(p, i) not in fresh,
                **columns,
            )
            for (p, i), sample, columns in zip(slots, chosen, scored, strict=True)
        ]

    def _sample(self, prompts: list[list[int]], advance: Callable[[int], None]) -> list[Sample]:
        if self.sharding.shards_weights and not global_max(self.accelerator, len(prompts)):
            return []  # and nobody needs all of the model
        with self.models.gathered_model.gathered(self.models.original) as model:
            return sample_responses(
                self.accelerator,
                model,
                self.tokenizer,
                prompts,
                self.sampling,
                self.settings.batch_size,
                advance,
            )

    def _reusable(self, record: RankedPrompt) -> list[Sample]:
        """Responses of the ranking dataset that this model sampled under these settings.

        One that ran past an end token, in a version that knew one alone, ends there.
        """
        if not self.settings.reuse:
            return []
        fitting = [r for r in record.responses if self._fits(r)]
        fitting.sort(key=lambda response: response.sample_index)
        ends = end_token_ids(self.tokenizer)
        return [cut(list(r.token_ids or ()), ends) for r in fitting][: self.settings.samples]

    def _fits(self, response: Response) -> bool:
        sampling = response.sampling
        return (
            response.token_ids is not None
            and response.model_fingerprint == self.description["hash"]
            and response.tokenizer_fingerprint == self.description["tokenizer"]
            and sampling is not None
            and sampling.is_untruncated
            and sampling.temperature == self.settings.temperature
            and sampling.max_new_tokens == self.settings.max_new_tokens
        )

    @torch.no_grad()
    def _score(
        self, prompts: list[Prompt], encoded: list[list[int]], samples: list[Sample]
    ) -> list[dict[str, Any]]:
        """Log-probs, entropy and reward of every response, in batches of similar length."""
        pad_id = int(self.tokenizer.pad_token_id)
        columns: dict[int, dict[str, Any]] = {}
        lengths = [len(sample.token_ids) for sample in samples]
        batches = batches_by_length(lengths, min(self.settings.batch_size, SCORE_BATCH))
        for rows in self.sharding.in_step(self.accelerator, batches):
            answers = [samples[row].token_ids for row in rows]
            sequences = Sequences.of([encoded[row] for row in rows], answers, pad_id)
            sequences = sequences.to(self.accelerator.device)
            values, top = self._score_batch(sequences)
            for position, row in enumerate(rows):
                length = len(samples[row].token_ids)
                columns[row] = {k: v[position, :length].tolist() for k, v in values.items()}
                columns[row]["top"] = top and TopTokens(*(v[position, :length] for v in top))
            if self.models.reward is not None:
                texts = [
                    decode_response(self.tokenizer, samples[row].token_ids, encoded[row])
                    for row in rows
                ]
                rewards = self.models.reward(
                    [prompts[row] for row in rows], texts, sequences.joined
                )
                for row, reward in zip(rows, rewards.tolist(), strict=True):
                    columns[row]["reward"] = reward
        return [columns[row] for row in range(len(samples))]

    def _score_batch(
        self, sequences: Sequences
    ) -> tuple[dict[str, Tensor], list[ndarray[Any, Any]] | None]:
        with self.accelerator.autocast():
            top_k = self.settings.store_top_k
            found = reference_log_probs(
                self.models.original, sequences, self.settings.temperature, top_k
            )
        values = {name: getattr(found, name) for name in ("log_probs", "log_probs_at_1", "entropy")}
        if not top_k:
            return values, None
        top = found.top_ids, found.top_log_probs, found.log_sum_exp
        return values, [one.cpu().numpy() for one in top]
