"""torchtitan's trainer on its smallest Llama 3, under torchrun on two ranks (FSDP2)."""

import json
import os
import tempfile
from pathlib import Path

from made_up import tokenizer
from peaks import print_peak
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger

init_logger()
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    tokenizer().save_pretrained(folder)
    text = " ".join(f"w{n % 500}" for n in range(4096))
    (folder / "texts").mkdir()
    (folder / "texts/train.json").write_text(json.dumps({"text": text}) + "\n")
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", attn_backend="sdpa")
    config.hf_assets_path = name
    config.dump_folder = name
    config.dataloader.dataset_path = str(folder / "texts")
    config.training.steps, config.training.seq_len, config.training.local_batch_size = 3, 256, 2
    config.validator.enable = False
    trainer = config.build()
    trainer.train()
    if os.environ["RANK"] == "0":
        print("steps", trainer.step)
    trainer.close()
print_peak()
