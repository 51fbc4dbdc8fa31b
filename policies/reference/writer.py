"""Sampling, scoring and writing the shards of a reference store."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from numpy import ndarray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policies.reference.settings import ReferenceSettings
from policies.reference.shards import ReferenceRow, TopTokens, write_shard
from policies.rewards import Reward, load_reward, reward_key
from policies.sampling.engines import FrozenModel, new_sampler
from policies.sampling.generate import Sample, Sampler, cut_at_end_token
from rlhf.modeling.attention.packing import pack_prefixes
from rlhf.modeling.chat_template import END_TOKENS, end_token_ids
from rlhf.modeling.log_probs import (
    SCORE_BATCH,
    Sequences,
    batches_by_prompt,
    reference_log_probs,
)
from rlhf.modeling.models import load_causal_lm
from rlhf.modeling.readers import described_kwargs
from rlhf.modeling.tokens import decode_response
from rlhf.parallel.distributed import from_main, global_max, global_sum, seed_all
from rlhf.parallel.gathered_model import GatheredModel
from rlhf.parallel.sharding import Sharding, shard_frozen
from rlhf.planning.utilization import TERA
from rlhf.records.schema import Prompt, RankedPrompt, Response, Sampling
from rlhf.run.metrics import progress
from rlhf.run.watchdog import beat

SHARD_SEED_STRIDE = 1_000_003


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


@dataclass(frozen=True)
class Models:
    """The models; `model_copy` has all weights of `original` where it is sharded.

    `attention` is how padded rows of `original` are attended.
    """

    original: PreTrainedModel
    attention: str
    model_copy: GatheredModel
    reward: Reward | None
    sampler: Sampler


def load_models(
    settings: ReferenceSettings,
    description: dict[str, str],
    accelerator: Accelerator,
    sharding: Sharding,
    longest: int,
) -> Models:
    """Load the original model, sharded as asked, the reward and the engine.

    `longest`: tokens of the longest prompt and response together.
    """
    path, engine = description["path"], settings.sampling.engine
    sampler = new_sampler(
        engine,
        path,
        accelerator,
        longest,
        settings.batch_size,
        lora_rank=0,
        tensor_parallel=settings.sampling.engine_tensor_parallel,
    )
    model = load_causal_lm(path, held=sharding.held(trained=False)).eval()
    attention = str(model.config._attn_implementation)
    pack_prefixes(model)
    model_copy = GatheredModel(model, accelerator.device, is_copy=sharding.shards_weights)
    shard_frozen(accelerator, model, sharding, exact=True)
    if settings.reward is None:
        return Models(model, attention, model_copy, None, sampler)
    given = described_kwargs(description)
    reward = load_reward([settings.reward], accelerator, sharding=sharding, given=given)
    return Models(model, attention, model_copy, reward, sampler)


@dataclass
class Clock:
    """Seconds of sampling and of scoring in this process, the rows scored, and those sampled."""

    sampling: float = 0.0
    scoring: float = 0.0
    rows: int = 0
    sampled: int = 0

    def phases(self, accelerator: Accelerator, rate: float) -> dict[str, float]:
        """Seconds of each phase, the mean of all processes, as the report has them.

        Every process calls it. `rate`: operations a second of a matrix product.
        """
        mine = torch.tensor(list(vars(self).values()), dtype=torch.float64)
        sampling, scoring, rows, sampled = global_sum(accelerator, mine).tolist()
        processes = int(accelerator.num_processes)
        return {
            "matmul_tflops": round(rate / TERA, 4),
            "sampling_seconds": round(sampling / processes, 3),
            "scoring_seconds": round(scoring / processes, 3),
            "rows": int(rows),
            "sampled_fraction": sampled / max(rows, 1),
        }


@dataclass(frozen=True)
class ShardWriter:
    """Models and settings that turn prompts into rows.

    Where weights are sharded, every process writes one shard at a time, and all gather the model
    once per shard to sample; those that have written theirs only take part in the gathering.
    """

    accelerator: Accelerator
    sharding: Sharding
    models: Models
    tokenizer: PreTrainedTokenizerBase
    settings: ReferenceSettings
    description: dict[str, str]
    prompt_ids: dict[str, list[int]]
    clock: Clock = field(default_factory=Clock)

    @property
    def sampling(self) -> Sampling:
        """How responses are sampled, as the manifest records it."""
        return Sampling(
            temperature=self.settings.sampling.temperature,
            max_new_tokens=self.settings.sampling.max_new_tokens,
            seed=self.settings.seed,
        )

    def facts(self, prompts_hash: str, reward: dict[str, str] | None) -> dict[str, Any]:
        """The manifest fields that describe how the rows were made."""
        return {
            "model": self.description,
            "prompts_hash": prompts_hash,
            "reward": reward and {**reward, "precision": self.settings.precision},
            "sampling": asdict(self.sampling),
            END_TOKENS: list(end_token_ids(self.tokenizer)),
            "stored_top_k": self.settings.store_top_k or 0,
            "precision": self.settings.precision,
            "attention": self.models.attention,
        }

    def write_missing(self, shards: dict[str, Sequence[RankedPrompt]], folder: Path) -> None:
        """Write every shard of this process that is not on disk yet."""
        mine = shards_of_rank(list(shards), self.settings, self.accelerator)
        missing = [name for name in mine if not (folder / name).is_file()]
        if self.sharding.is_tensor_parallel:
            missing = from_main(missing)
        numbers = {name: number for number, name in enumerate(shards, start=1)}
        judge = self.models.reward
        reward = reward_key(judge.description, self.settings.precision) if judge else None
        sizes = {name: len(shards[name]) * self.settings.sampling.samples for name in mine}
        total, lacking = sum(sizes.values()), sum(sizes[name] for name in missing)
        calls = self.sharding.equal_calls(self.accelerator, missing, list(shards)[:1])
        counted = progress("writing reference outputs", total, total - lacking, is_stage=True)
        with counted as bar:
            for name, is_own in calls:
                if not is_own:
                    self._take_part(shards[name][0].prompt)
                    continue
                seed_all(self.settings.seed + SHARD_SEED_STRIDE * numbers[name])
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
        slots = [(p, i) for p in range(len(records)) for i in range(self.settings.sampling.samples)]
        missing = [(p, i) for p, i in slots if i >= len(reused[p])]
        advance(len(slots) - len(missing))
        began = time.monotonic()
        sampled = self._sample([encoded[p] for p, _ in missing], advance)
        sampled_at = time.monotonic()
        fresh = dict(zip(missing, sampled, strict=True))
        chosen = [fresh[slot] if slot in fresh else reused[slot[0]][slot[1]] for slot in slots]
        scored = self._score([prompts[p] for p, _ in slots], [encoded[p] for p, _ in slots], chosen)
        self.clock.sampling += sampled_at - began
        self.clock.scoring += time.monotonic() - sampled_at
        self.clock.rows += len(slots)
        self.clock.sampled += len(missing)
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
        if self.settings.sampling.engine == "vllm":  # which has weights of its own
            return self._sample_from(None, prompts, advance)
        if self.sharding.shards_weights and not global_max(self.accelerator, len(prompts)):
            return []  # and nobody needs all of the model
        with self.models.model_copy.weights_of(self.models.original) as model:
            return self._sample_from(model, prompts, advance)

    def _sample_from(
        self,
        model: PreTrainedModel | None,
        prompts: list[list[int]],
        advance: Callable[[int], None],
    ) -> list[Sample]:
        size, sampler = self.settings.batch_size, self.models.sampler
        source = FrozenModel(self.accelerator, self.tokenizer, model, sampler, size)
        return source.sample(prompts, self.sampling, advance)

    def _reusable(self, record: RankedPrompt) -> list[Sample]:
        """Responses of the ranking dataset that this model sampled under these settings.

        Each is cut at its first end token: versions that knew one end token sampled past the
        others.
        """
        if not self.settings.sampling.reuse:
            return []
        fitting = [r for r in record.responses if self._fits(r)]
        fitting.sort(key=lambda response: response.sample_index)
        end_tokens = end_token_ids(self.tokenizer)
        return [cut_at_end_token(list(r.token_ids or ()), end_tokens) for r in fitting][
            : self.settings.sampling.samples
        ]

    def _fits(self, response: Response) -> bool:
        sampling = response.sampling
        return (
            response.token_ids is not None
            and response.model_fingerprint == self.description["hash"]
            and response.tokenizer_fingerprint == self.description["tokenizer"]
            and sampling is not None
            and sampling.is_untruncated
            and sampling.temperature == self.settings.sampling.temperature
            and sampling.max_new_tokens == self.settings.sampling.max_new_tokens
        )

    @torch.no_grad()
    def _score(
        self, prompts: list[Prompt], encoded: list[list[int]], samples: list[Sample]
    ) -> list[dict[str, Any]]:
        """Log-probs, entropy and reward of every response."""
        pad_id = int(self.tokenizer.pad_token_id)
        columns: dict[int, dict[str, Any]] = {}
        lengths = [len(sample.token_ids) for sample in samples]
        batches = batches_by_prompt(encoded, lengths, min(self.settings.batch_size, SCORE_BATCH))
        for rows, _ in self.sharding.equal_calls(self.accelerator, batches):
            responses = [samples[row].token_ids for row in rows]
            sequences = Sequences.of([encoded[row] for row in rows], responses, pad_id)
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
            top_k = self.settings.store_top_k or 0
            reference = reference_log_probs(
                self.models.original, sequences, self.settings.sampling.temperature, top_k
            )
        values = {
            name: getattr(reference, name) for name in ("log_probs", "log_probs_at_1", "entropy")
        }
        if not top_k:
            return values, None
        top = reference.top_ids, reference.top_log_probs, reference.log_sum_exp
        return values, [tensor.cpu().numpy() for tensor in top]
