"""torchtitan's trainer on its smallest Llama 3, under torchrun on two ranks (FSDP2)."""

import json
import os
import tempfile
from pathlib import Path

from made_up import tokenizer
from peaks import print_peak
from torchtitan.config import JobConfig
from torchtitan.train import Trainer

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    tokenizer().save_pretrained(folder)
    text = " ".join(f"w{n % 500}" for n in range(4096))
    (folder / "texts").mkdir()
    (folder / "texts/train.json").write_text(2 * (json.dumps({"text": text}) + "\n"))
    config = JobConfig()
    config.model.name, config.model.flavor = "llama3", "debugmodel"
    config.model.hf_assets_path = name
    config.job.dump_folder = name
    config.training.dataset_path = str(folder / "texts")
    config.training.steps, config.training.seq_len, config.training.local_batch_size = 3, 256, 2
    trainer = Trainer(config)
    trainer.train()
    if os.environ["RANK"] == "0":
        print("steps", trainer.step)
    trainer.close()
print_peak()
