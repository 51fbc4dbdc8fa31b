"""vLLM as the sampler of rollouts, in the trainer's process: it holds a copy of the weights.

The copy is given the policy's weights of the moment before every batch, adapters merged in.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from rlhf.adapters import merged_weights
from rlhf.checkpoint import random_states, set_random_states
from rlhf.errors import InputError
from rlhf.ppo_plan import VLLM_PAGE

MAX_SEED = 2**31
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, where the weights are
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads are the trainer's affair
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
REMEDY = "Use --engine generate, which samples from every model."

# vLLM keeps its groups of processes in global variables, and when an engine goes it takes torch's
# with it. So there is one at a time, and the last one stays.
_LIVING: list[Any] = []


class VLLM:
    """A sampler for `policies.generate.sample_responses`.

    Args:
        model: folder or hub name of the model that the policy starts from.
        config: of the policy.
        accelerator: device, precision and processes; each process has an engine.
        longest: tokens of the longest prompt and response together.
        requests: responses in work at one time, at most.

    Raises:
        InputError: vLLM cannot run this model.
    """

    def __init__(
        self,
        model: str,
        config: PreTrainedConfig,
        accelerator: Accelerator,
        longest: int,
        requests: int,
    ) -> None:
        os.environ.update(ENVIRONMENT)
        from vllm import LLM

        dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
        alone = accelerator.num_processes == 1
        while _LIVING:
            _LIVING.pop().llm_engine.engine_core.shutdown()
        with _undisturbed(), _refusing(config):
            self.llm = LLM(
                model=model,
                skip_tokenizer_init=True,
                generation_config="vllm",  # not the model's own
                load_format="dummy",  # the policy's weights follow
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=longest,
                max_num_seqs=requests,
                kv_cache_memory_bytes=cache_bytes(config, dtype, longest, requests),
                gpu_memory_utilization=0.01,  # the line above counts; 0 is refused
                logprobs_mode="processed_logprobs",  # after the temperature
                distributed_executor_backend="uni" if alone else "external_launcher",
                enforce_eager=accelerator.device.type == "cpu",  # else with CUDA graphs
                disable_log_stats=True,
            )
        _LIVING.append(self.llm)

    def __call__(
        self,
        accelerator: Accelerator,
        model: PreTrainedModel,
        prompts: Sequence[list[int]],
        config: GenerationConfig,
        requests: int,
    ) -> list[tuple[list[int], list[float]]]:
        """Token ids of a response to each prompt, and what vLLM says is their log-probability.

        Every response has a random seed of its own, drawn from torch's generator.

        Raises:
            InputError: vLLM cannot run this model.
        """
        seeds = torch.randint(MAX_SEED, (len(prompts),)).tolist()
        weights = merged_weights(model, model.state_dict())
        told = [{"prompt_token_ids": ids} for ids in prompts]
        with _undisturbed(), _refusing(model.config):
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights.items()})
            self.llm.reset_prefix_cache()  # keys and values of the weights before
            how = [_sampling(config, seed) for seed in seeds]
            found = self.llm.generate(told, how, use_tqdm=False)
        return [_told(one.outputs[0]) for one in found]


def cache_bytes(config: PreTrainedConfig, dtype: torch.dtype, length: int, requests: int) -> int:
    """Of the keys and values of so many responses at full length, and of one more."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    tokens = (requests + 1) * VLLM_PAGE * math.ceil(length / VLLM_PAGE)
    return int(2 * text.num_hidden_layers * heads * width * dtype.itemsize * tokens)


def _sampling(config: GenerationConfig, seed: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_new_tokens,
        stop_token_ids=[config.eos_token_id],
        seed=seed,
        logprobs=0,  # of the chosen token alone
        detokenize=False,
    )


def _told(output: Any) -> tuple[list[int], list[float]]:
    ids = list(output.token_ids)
    chosen = zip(ids, output.logprobs, strict=True)
    return ids, [float(known[token].logprob) for token, known in chosen]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Inside, random numbers may be seeded anew; afterwards they go on as before."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


@contextmanager
def _refusing(config: PreTrainedConfig) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ValueError, NotImplementedError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"vLLM cannot sample from this {config.model_type} model ({reason})", REMEDY
        ) from error
