"""Rewards for reference outputs that are already stored: `rlhf reference --reward R --out STORE`.

The store stays valid throughout. The manifest first drops the name of the old reward; then every
shard is replaced atomically; when all shards have the new rewards, the manifest names them. After
an interruption, the same command continues with the shards that lack them.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from policies.reference.build import heartbeat_of
from policies.reference.settings import ReferenceSettings
from policies.reference.shards import (
    describe_shard,
    read_table,
    require_unchanged,
    reward_of,
    rows_of,
    with_rewards,
    write_table,
)
from policies.reference.store import MANIFEST, ReferenceRow, ReferenceStore, read_manifest
from policies.reference.writer import shards_of_rank, writes
from policies.rewards import (
    Reward,
    describe_rewards,
    is_model,
    load_reward,
    reads_tokens,
    reward_key,
)
from rlhf.errors import InputError, InterruptedRunError
from rlhf.modeling.log_probs import SCORE_BATCH
from rlhf.modeling.readers import described_kwargs, tokenizer_of
from rlhf.parallel.distributed import from_main, global_sum, precision_of, start
from rlhf.parallel.sharding import Sharding
from rlhf.parallel.sharding_choice import choose_sharding
from rlhf.planning.price import cost_of
from rlhf.ranks import is_restart
from rlhf.records.jsonl import write_json
from rlhf.run.metrics import progress
from rlhf.run.rundir import RunDir, require_done
from rlhf.run.telemetry.job_clock import job_clock
from rlhf.run.watchdog import watching

# In the manifest, of functions and endpoints, which may change under their names:
TIMES_REPLACED = "rewards_replaced"  # how often --replace-reward has begun
REPLACING = "replacing"  # by which one, until all shards have its rewards


def add_rewards(settings: ReferenceSettings) -> dict[str, Any]:
    """Score the outputs that a store holds, in place, and return its report.

    Raises:
        InputError: there is no finished store, the reward cannot be used, or the store has
            rewards of another one or in another precision.
    """
    assert settings.reward is not None
    run = require_done(settings.out, "reference", "outputs")
    sharding = choose_sharding(settings) if reads_tokens(settings.reward) else Sharding()
    accelerator = start(settings.precision, settings.seed)
    manifest = from_main(read_manifest(run.outputs))
    description = describe_rewards([settings.reward], manifest["model"])["reward"]
    precision = precision_of(accelerator)
    stored, wanted = manifest["reward"], {**description, "precision": precision}
    begins = _begins_again(settings, manifest, description["hash"])
    if stored is not None and not begins and _is_wanted(stored, wanted, settings):
        return run.read_report()
    if stored is not None:
        _require_replacing(settings, stored, wanted)
        manifest = {**manifest, "reward": None}
    if begins:
        times = manifest.get(TIMES_REPLACED, 0) + 1
        manifest = {**manifest, TIMES_REPLACED: times, REPLACING: description["hash"]}
    if (stored is not None or begins) and accelerator.is_main_process:
        write_json(run.outputs / MANIFEST, manifest)
    accelerator.wait_for_everyone()
    key = _shard_key(description, precision, manifest)
    reader = description if reads_tokens(settings.reward) else manifest["model"]
    tokenizer = tokenizer_of(reader)
    reward = load_reward(
        [settings.reward],
        accelerator,
        sharding=sharding,
        given=described_kwargs(manifest["model"]),
    )
    names = list(manifest["shards"])
    mine = {n: manifest["shards"][n] for n in shards_of_rank(names, settings, accelerator)}
    heartbeat = heartbeat_of(run, settings)
    # the stage stays finished even if scoring fails
    with (
        job_clock(heartbeat),
        watching(heartbeat, settings.parallel.stall_timeout, _print_error),
    ):
        for name, expected in mine.items():
            require_unchanged(run.outputs / name, expected, scored=False)
        _require_one_precision(settings, run.outputs, names, wanted)
        scorer = _Scorer(accelerator, sharding, reward, tokenizer, key, settings.batch_size)
        scorer.score(run.outputs, mine)
        accelerator.wait_for_everyone()
    scored = from_main([name for name in names if reward_of(run.outputs / name) == key])
    if len(scored) < len(names):
        accelerator.wait_for_everyone()
        return {"shards": {"scored": len(scored), "of": len(names)}}
    if accelerator.is_main_process:
        _record_rewards(run, manifest, wanted, settings.price_per_hour)
    accelerator.wait_for_everyone()
    return run.read_report()


def _print_error(error: InterruptedRunError) -> None:
    sys.stderr.write(f"error {error}\n")
    sys.stderr.flush()


@dataclass(frozen=True)
class _Scorer:
    accelerator: Accelerator
    sharding: Sharding
    reward: Reward
    tokenizer: PreTrainedTokenizerBase
    key: str
    batch_size: int

    def score(self, folder: Path, shards: dict[str, dict[str, Any]]) -> None:
        """Score this rank's shards that have no rewards yet."""
        lacking = [name for name in shards if reward_of(folder / name) != self.key]
        if self.sharding.is_tensor_parallel:
            lacking = from_main(lacking)
        total, left = (sum(shards[name]["rows"] for name in some) for some in (shards, lacking))
        spare = sorted(path.name for path in folder.glob("*.parquet"))[:1]
        counted = progress("scoring reference outputs", total, total - left, is_stage=True)
        with counted as bar:
            for name, is_own in self.sharding.equal_calls(self.accelerator, lacking, spare):
                table = read_table(folder / name)
                if not is_own:  # other ranks still have files and need this rank's weights
                    self._rewards(rows_of(table)[:1])
                    continue
                rewards = self._rewards(rows_of(table))
                if writes(self.accelerator, self.sharding):
                    write_table(folder / name, with_rewards(table, rewards), self.key)
                bar.advance(shards[name]["rows"])

    def _rewards(self, rows: Sequence[ReferenceRow]) -> list[float]:
        device = self.accelerator.device
        size = min(self.batch_size, SCORE_BATCH)
        return self.reward.score_rows(rows, self.tokenizer, device, size)


def _shard_key(description: Mapping[str, str], precision: str, manifest: Mapping[str, Any]) -> str:
    """The mark of a scored shard: of a function or endpoint also which replacement scored it."""
    key, times = reward_key(description, precision), manifest.get(TIMES_REPLACED, 0)
    return key if is_model(description["path"]) or not times else f"{key} #{times}"


def _begins_again(settings: ReferenceSettings, manifest: Mapping[str, Any], hash_: str) -> bool:
    """Whether --replace-reward scores all again; else it goes on where it was stopped.

    The weights of a model are known; a function or endpoint may have changed under its name.
    """
    assert settings.reward is not None
    changes = settings.replace_reward and not is_model(settings.reward)
    return changes and manifest.get(REPLACING) != hash_ and not is_restart()


def _is_wanted(
    stored: Mapping[str, str], wanted: Mapping[str, str], settings: ReferenceSettings
) -> bool:
    """Whether the store has these rewards; `--precision auto` takes them in either precision."""
    if settings.precision == "auto":
        return stored["hash"] == wanted["hash"]
    return reward_key(stored, stored.get("precision")) == reward_key(wanted, wanted["precision"])


def _require_one_precision(
    settings: ReferenceSettings, folder: Path, names: Sequence[str], wanted: Mapping[str, str]
) -> None:
    """Refuse to go on where another job, or this one before, scored in another precision."""
    other_precision = "fp32" if wanted["precision"] == "bf16" else "bf16"
    keys = from_main([reward_of(folder / name) for name in names])
    scored = 0 if settings.replace_reward else keys.count(f"{wanted['hash']} {other_precision}")
    if scored:
        again = "score all of them again: --replace-reward."
        in_both = f"{wanted['hash']} {wanted['precision']}" in keys
        raise InputError(
            f"{scored} of {len(keys)} files in {folder} have the rewards of {wanted['path']} in "
            f"{other_precision}; this job computes in {wanted['precision']}",
            again.capitalize() if in_both else f"Add --precision {other_precision}, or {again}",
        )


def _require_replacing(
    settings: ReferenceSettings, stored: Mapping[str, str], wanted: Mapping[str, str]
) -> None:
    if not settings.replace_reward:
        raise InputError(
            f"The outputs in {settings.out} have the rewards of {_name(stored)}, "
            f"not of {_name(wanted)}",
            "Add --replace-reward to give them the new ones.",
        )


def _name(reward: Mapping[str, str]) -> str:
    precision = f" in {reward['precision']}" if "precision" in reward else ""
    return f"{reward['path']} ({reward['hash']}){precision if is_model(reward['path']) else ''}"


def _record_rewards(
    run: RunDir,
    manifest: dict[str, Any],
    reward: dict[str, str],
    price_per_hour: float | None,
) -> None:
    """Record the rewards that all shards have now; the manifest, which readers use, comes last.

    The cost is that of sampling and scoring, at the price of sampling where none is given.
    """
    report = run.read_report()
    if price_per_hour is None:
        price_per_hour = report.get("cost", {}).get("price_per_hour")
    cost = cost_of(run, price_per_hour)
    shards = {
        name: {**shard, "rewards": describe_shard(read_table(run.outputs / name))["rewards"]}
        for name, shard in manifest["shards"].items()
    }
    stage = run.read_stage()
    described = {key: value for key, value in reward.items() if key != "precision"}
    write_json(run.stage_file, {**stage, "inputs": {**stage["inputs"], "reward": described}})
    write_json(run.report_json, {**report, "reward": described, "cost": cost})
    done = {key: value for key, value in manifest.items() if key != REPLACING}
    write_json(run.outputs / MANIFEST, {**done, "reward": reward, "shards": shards})


def is_scored_by(store: ReferenceStore, model: Reward, precision: str) -> bool:
    """Whether the rows of a store have the rewards that a reward model would give them here.

    Those in bf16 differ from those in fp32, and a function may have changed under the same name.
    """
    stored = store.manifest["reward"]
    return (
        is_model(model.description["path"])
        and stored is not None
        and reward_key(stored, stored.get("precision")) == reward_key(model.description, precision)
    )


def rewards_by_prompt(
    store: ReferenceStore,
    reward: Reward,
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
    sharding: Sharding | None = None,
) -> dict[str, list[float]]:
    """r(y0) of every reference output, by prompt id: as the store has them, else computed now.

    Those of a function or endpoint are computed now: it may have changed under its name.

    Each process scores a part, except under tensor parallelism, where all score the same. Batches
    are those of one process, and so are the rewards.
    """
    is_stored = is_scored_by(store, reward, precision_of(accelerator))
    columns = [table.to_pydict() for table in store.rows.tables("prompt_id", "reward")]
    if is_stored:
        rewards = [value for part in columns for value in part["reward"]]
    else:
        splits = not (sharding or Sharding()).is_tensor_parallel
        share = (accelerator.process_index, accelerator.num_processes) if splits else (0, 1)
        rewards = reward.score_rows(store.rows, tokenizer, accelerator.device, share=share)
        if splits:
            mine = torch.tensor(rewards, dtype=torch.float64)
            rewards = global_sum(accelerator, mine).tolist()
    prompt_ids = [prompt_id for part in columns for prompt_id in part["prompt_id"]]
    grouped: dict[str, list[float]] = {}
    for prompt_id, value in zip(prompt_ids, rewards, strict=True):
        grouped.setdefault(prompt_id, []).append(value)
    return grouped
