"""vLLM as a sampler, in this process.

It holds a copy of the weights. In PPO it gets the policy's current weights before every batch, with
adapters merged; a model that is not trained it reads from disk once.
"""

import gc
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from accelerate import Accelerator
from transformers import GenerationConfig, PreTrainedModel

from rlhf.errors import InputError
from rlhf.modeling.adapters import merged_weights
from rlhf.planning.planner import read_shape, vllm_cache_bytes
from rlhf.run.checkpoint import random_states, set_random_states

MAX_SEED = 2**31
USUAL = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer sets the threads
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

# vLLM keeps its groups of processes in global variables, and an engine that is shut down takes
# torch's with it. So there is one at a time.
_engines: list["VLLM"] = []


@final
class VLLM:
    """A sampler for `policies.sampling.generate.sample_responses`.

    Args:
        model: folder or hub name of the model, or of the one that the policy starts from.
        accelerator: device, precision and processes; each process has an engine.
        longest: tokens of the longest prompt and response together.
        requests: the most responses sampled at the same time.
        is_frozen: the weights are those of `model`; else they come with every call.

    Raises:
        InputError: vLLM does not start with this model.
    """

    def __init__(
        self,
        model: str,
        accelerator: Accelerator,
        longest: int,
        requests: int,
        *,
        is_frozen: bool = False,
    ) -> None:
        self.is_frozen = is_frozen
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, with the weights
        for name, value in USUAL.items():
            os.environ.setdefault(name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that vLLM uses
            from vllm import LLM, SamplingParams

        dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
        alone = accelerator.num_processes == 1
        cache = vllm_cache_bytes(read_shape(model), requests, longest, dtype.itemsize)
        shut_down()
        with _keeping_random_state(), _refusing(model):
            self.llm: Any = LLM(
                model=model,
                trust_remote_code=False,
                skip_tokenizer_init=True,
                generation_config="vllm",  # not the model's own
                load_format="auto" if is_frozen else "dummy",  # weights that are trained follow
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=longest,
                max_num_seqs=requests,
                kv_cache_memory_bytes=cache,
                gpu_memory_utilization=0.01,  # the line above counts; 0 is refused
                logprobs_mode="processed_logprobs",  # after the temperature
                distributed_executor_backend="uni" if alone else "external_launcher",
                enforce_eager=accelerator.device.type == "cpu",  # else with CUDA graphs
                disable_log_stats=True,
            )
            _engines.append(self)
            self.llm.llm_engine.engine_core._finalizer.atexit = False
            trial = SamplingParams(max_tokens=1, detokenize=False)
            self.llm.generate({"prompt_token_ids": [0]}, trial, use_tqdm=False)

    def __call__(
        self,
        accelerator: Accelerator,
        model: PreTrainedModel | None,
        prompts: Sequence[list[int]],
        config: GenerationConfig,
        requests: int,
    ) -> list[tuple[list[int], list[float]]]:
        """Token ids of a response to each prompt, and what vLLM says is their log-probability.

        Every response has a random seed of its own, drawn from torch's generator.
        """
        seeds = torch.randint(MAX_SEED, (len(prompts),)).tolist()
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        with _keeping_random_state():
            if not self.is_frozen:
                self._reload_weights(model)
            how = [_sampling(config, seed) for seed in seeds]
            found = self.llm.generate(inputs, how, use_tqdm=False)
        return [_tokens_and_log_probs(one.outputs[0]) for one in found]

    def _reload_weights(self, model: PreTrainedModel | None) -> None:
        assert model is not None
        weights = merged_weights(model, model.state_dict())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights.items()})
        assert self.llm.reset_prefix_cache()  # keys and values of the weights before


def shut_down() -> None:
    """End the engine of this process, if there is one, and drop all references to its weights.

    vLLM itself may keep some of a GPU's memory until the process ends.
    """
    while _engines:
        engine = _engines.pop()
        engine.llm.llm_engine.engine_core.shutdown()
        engine.llm = None
        gc.collect()


def _sampling(config: GenerationConfig, seed: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_new_tokens,
        stop_token_ids=config.eos_token_id,
        ignore_eos=True,  # those that vLLM reads from the model; the line above has all
        seed=seed,
        logprobs=0,  # of the chosen token alone
        detokenize=False,
    )


def _tokens_and_log_probs(output: Any) -> tuple[list[int], list[float]]:
    ids = list(output.token_ids)
    chosen = zip(ids, output.logprobs, strict=True)
    return ids, [float(known[token].logprob) for token, known in chosen]


@contextmanager
def _keeping_random_state() -> Iterator[None]:
    """Restore the state of the random generators and the number of threads afterwards."""
    states, threads = random_states(), torch.get_num_threads()
    try:
        yield
    finally:
        set_random_states(states)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@contextmanager
def _refusing(model: str) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, torch.distributed.DistError):
        raise  # they have remedies of their own
    except (ValueError, NotImplementedError, RuntimeError) as error:
        # vLLM's settings are pydantic's, whose own text counts errors first
        reason = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error) or repr(error)
        raise InputError(
            f"vLLM does not start with {model} ({reason.strip().splitlines()[0]})",
            "Use --engine generate, which samples from every model.",
        ) from error
