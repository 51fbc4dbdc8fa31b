"""vLLM as a sampler, in this process.

It has weights of its own. In PPO it gets the policy's before every batch, one at a time: a sharded
one is gathered, its adapters are merged, and it is freed again. In bf16 it gets the adapters alone,
beside weights that it has read from disk: rounded to bf16, W + BA is mostly W again. A model that
is not trained it reads from disk once. Several ranks may share an engine, each with a part of every
matrix.
"""

import gc
import os
import shlex
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from policies.sampling.generate import OnBatch, TokensAndLogProbs
from rlhf.errors import InputError
from rlhf.modeling.adapters import each_merged_weight, save_policy_adapters
from rlhf.parallel.distributed import extend_timeouts
from rlhf.parallel.gathered_model import whole
from rlhf.planning.planner import read_shape, tensor_parallel_shape
from rlhf.planning.sampling_plan import vllm_cache_bytes, vllm_pass_tokens
from rlhf.run.checkpoint import random_states, set_random_states

MAX_SEED = 2**31
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters that vLLM makes room for
USUAL = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer sets the threads
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
SHARED_MEMORY = "cpushm_"  # in the names of files that the CPU build makes in /dev/shm

# vLLM keeps its groups of processes in global variables, and an engine that is shut down takes
# torch's with it. So there is one at a time.
_engines: list["VLLM"] = []


@final
class VLLM:
    """A `Sampler`; a call samples all its prompts in one run of the engine.

    Args:
        model: folder or hub name of the model, or of the one that the policy starts from.
        accelerator: device, precision and processes; each process has an engine.
        longest: tokens of the longest prompt and response together.
        requests: the most responses sampled at the same time.
        lora_rank: of the adapters that a policy has on the weights of `model`; with bf16 weights of
            its own they alone come with every call. 0: nothing comes; None: all weights do.
        tensor_parallel: neighboring ranks that share an engine; they call it at the same time.

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
        lora_rank: int | None = None,
        tensor_parallel: int = 1,
    ) -> None:
        self.is_frozen = lora_rank == 0
        self.tensor_parallel = tensor_parallel
        # between batches a GPU's memory is free for the update
        self.sleeps = accelerator.device.type == "cuda" and not self.is_frozen
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, with the weights
        for name, value in USUAL.items():
            os.environ.setdefault(name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that vLLM uses
            from vllm import LLM, SamplingParams

        self.device = accelerator.device
        self.dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
        self.takes_adapters = bool(lora_rank) and self.dtype == torch.bfloat16
        alone = accelerator.num_processes == 1
        requests *= tensor_parallel  # of all ranks that share the engine
        part = tensor_parallel_shape(read_shape(model), tensor_parallel)
        cache = vllm_cache_bytes(part, requests, longest, self.dtype.itemsize)
        shut_down()
        with _keeping_random_state(), _refusing(model):
            self.llm: Any = LLM(
                model=model,
                trust_remote_code=False,
                skip_tokenizer_init=True,
                generation_config="vllm",  # not the model's own
                # weights that are trained follow
                load_format="auto" if self.is_frozen or self.takes_adapters else "dummy",
                enable_lora=self.takes_adapters,
                max_lora_rank=_room_for(lora_rank or 1),
                dtype=str(self.dtype).removeprefix("torch."),
                max_model_len=longest,
                max_num_seqs=requests,
                max_num_batched_tokens=vllm_pass_tokens(requests, longest),
                kv_cache_memory_bytes=cache,
                gpu_memory_utilization=0.01,  # the line above counts; 0 is refused
                logprobs_mode="processed_logprobs",  # after the temperature
                distributed_executor_backend="uni" if alone else "external_launcher",
                tensor_parallel_size=tensor_parallel,
                enable_sleep_mode=self.sleeps,
                enforce_eager=accelerator.device.type == "cpu",  # else with CUDA graphs
                disable_log_stats=True,
            )
            _engines.append(self)
            _release_names()
            extend_timeouts()
            self.llm.llm_engine.engine_core._finalizer.atexit = False
            trial = SamplingParams(max_tokens=1, detokenize=False)
            self.llm.generate({"prompt_token_ids": [0]}, trial, use_tqdm=False)
            self._sleep()

    def __call__(
        self,
        model: PreTrainedModel | None,
        prompts: Sequence[list[int]],
        config: GenerationConfig,
        batch_size: int,
        on_batch: OnBatch,
    ) -> list[TokensAndLogProbs]:
        """See `Sampler`; the engine was started with its own maximum of responses at once.

        Every response has a random seed of its own, drawn from torch's generator.
        """
        seeds = torch.randint(MAX_SEED, (len(prompts),)).tolist()
        given, mine = self._of_all_ranks(list(zip(prompts, seeds, strict=True)))
        with _keeping_random_state():
            adapters = self._take_weights(model)
            inputs = [{"prompt_token_ids": ids} for ids, _ in given]
            vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
            parameters = [_sampling(config, seed, vocabulary) for _, seed in given]
            outputs = self.llm.generate(inputs, parameters, use_tqdm=False, **adapters)
            self._sleep()
        on_batch(len(prompts))
        return [_tokens_and_log_probs(output.outputs[0]) for output in outputs[mine]]

    def _of_all_ranks(
        self, mine: list[tuple[list[int], int]]
    ) -> tuple[list[tuple[list[int], int]], slice]:
        """The requests of all ranks that share the engine, and where this rank's stand."""
        if self.tensor_parallel == 1:
            return mine, slice(None)
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        parts: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(parts, mine, group=group.cpu_group)
        first = sum(map(len, parts[: group.rank_in_group]))
        return list(chain.from_iterable(parts)), slice(first, first + len(mine))

    def _take_weights(self, model: PreTrainedModel | None) -> dict[str, Any]:
        """Give the engine the weights of a model, and return what `generate` must be told."""
        if self.takes_adapters:
            return {"lora_request": self._load_adapters(model)}
        if not self.is_frozen:
            self._reload_weights(model)
        return {}

    def _load_adapters(self, model: PreTrainedModel | None) -> Any:
        """Load the model's adapters into the engine; the result names them."""
        from vllm.lora.request import LoRARequest

        assert model is not None
        if self.sleeps:
            self.llm.wake_up()
        assert self.llm.reset_prefix_cache()
        with TemporaryDirectory() as folder:
            save_policy_adapters(Path(folder), model, lambda weight: whole(weight, self.device))
            # a request to `generate` that loads in place would do so for every token
            self.llm.llm_engine.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))
            return LoRARequest("policy", 1, folder)  # those that are loaded

    @torch.no_grad()
    def _reload_weights(self, model: PreTrainedModel | None) -> None:
        """Give the engine the model's weights one by one, whole and with adapters merged."""
        assert model is not None
        dtype = None if hasattr(model, "peft_config") else self.dtype  # merged in float32

        def gather(weight: Tensor) -> Tensor:
            return whole(weight, self.device, dtype)

        if self.sleeps:
            self.llm.wake_up(tags=["weights"])
        weights = each_merged_weight(model, model.state_dict(keep_vars=True), gather)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self.sleeps:
            self.llm.wake_up(tags=["kv_cache"])
        assert self.llm.reset_prefix_cache()  # keys and values of the weights before

    def _sleep(self) -> None:
        """Free a GPU's memory until the next weights come."""
        if self.sleeps:
            # weights that come again are discarded; others wait in main memory
            self.llm.sleep(level=1 if self.takes_adapters else 2)


def _room_for(rank: int) -> int:
    """The least rank that vLLM makes room for and that is not below the given one."""
    # vLLM says which are too large
    return next((allowed for allowed in RANKS if allowed >= rank), rank)


def shut_down() -> None:
    """End the engine of this process, if there is one, and drop all references to its weights.

    vLLM itself may keep some of a GPU's memory until the process ends.
    """
    while _engines:
        engine = _engines.pop()
        engine.llm.llm_engine.engine_core.shutdown()
        engine.llm = None
        gc.collect()


def _release_names() -> None:
    """Remove the names of the CPU build's shared memory, which all ranks of the engine have mapped.

    Every engine that ranks share takes the same names, and a killed process would leave them: no
    other engine could start.
    """
    maps = Path("/proc/self/maps")
    for line in maps.read_text("utf-8").splitlines() if maps.is_file() else ():
        if SHARED_MEMORY in line:  # address, access, offset, device, inode, path
            Path(line.split(maxsplit=5)[-1]).unlink(missing_ok=True)


def _sampling(config: GenerationConfig, seed: int, vocabulary: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_new_tokens,
        stop_token_ids=[token_id for token_id in config.eos_token_id if token_id < vocabulary],
        ignore_eos=True,  # those that vLLM reads from the model; the line above has all
        seed=seed,
        logprobs=0,  # of the chosen token alone
        detokenize=False,
    )


def _tokens_and_log_probs(output: Any) -> TokensAndLogProbs:
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
        if "create shm in SHMManager failed. errno: 17" in str(error):  # EEXIST
            files = shlex.join(map(str, sorted(Path("/dev/shm").glob(f"*{SHARED_MEMORY}*"))))
            raise InputError(
                f"vLLM cannot make its shared memory, which is there already: {files}",
                "A killed engine has left it, unless another one is starting on this machine. "
                f"Remove it: rm {files}",
            ) from error
        # vLLM's settings are pydantic's, whose own text counts errors first
        reason = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error) or repr(error)
        raise InputError(
            f"vLLM does not start with {model} ({reason.strip().splitlines()[0]})",
            "Use --engine generate, which samples from every model.",
        ) from error
