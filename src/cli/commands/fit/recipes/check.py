"""Checks a request of `memtrace fit --recipe` in the user's Python.

The arguments are MODEL FOLDER LENGTH TRUST PACKAGE... Writes the model's config.json into FOLDER. If the
request cannot be met, prints the reason and exits with 2.
"""

import importlib.util
import json
import os
import shutil
import sys

model, folder, length, trust, *packages = sys.argv[1:]


def refuse(why):
    print(why, file=sys.stderr)
    sys.exit(2)


missing = [name for name in packages if importlib.util.find_spec(name) is None]
if missing:
    names = " ".join(missing)
    refuse(f"the recipe needs {' and '.join(missing)}: {sys.executable} -m pip install {names}")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import transformers  # noqa: E402
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig  # noqa: E402

if os.path.isfile(model):
    model = os.path.dirname(os.path.abspath(model)) if os.path.basename(model) == "config.json" else model
if os.path.isdir(model) and not os.path.isfile(os.path.join(model, "config.json")):
    refuse(f"--model {model}: the folder has no config.json")
try:
    facts, _ = PretrainedConfig.get_config_dict(model)
except Exception as error:
    last = str(error).strip().splitlines()
    refuse(f"--model {model}: no config.json was found or read: {last[0] if last else type(error).__name__}")
kind = facts.get("model_type")
if not facts:
    refuse(f"--model {model}: no config.json was found as a file, in the cache or on the hub")
if "auto_map" in facts and kind not in CONFIG_MAPPING and trust != "1":
    refuse(f"--model {model}: the configuration has its own code, which is run only with --trust-remote-code")
if kind not in CONFIG_MAPPING and "auto_map" not in facts:
    known = f"transformers {transformers.__version__}"
    refuse(
        f"--model {model}: {known} has no model type {kind!r}; a newer one may: pip install -U transformers"
    )
try:
    config = AutoConfig.from_pretrained(model, trust_remote_code=trust == "1")
except Exception as error:
    refuse(f"--model {model}: {str(error).strip().splitlines()[0]}")
text = config.get_text_config()
most = getattr(text, "max_position_embeddings", None)
if isinstance(most, int) and int(length) > most:
    refuse(f"--seq {length}: the model's limit is {most} tokens (max_position_embeddings)")
os.makedirs(folder, exist_ok=True)
if os.path.isdir(model):
    # A configuration with its own code needs the Python files in its folder.
    for name in os.listdir(model):
        if name == "config.json" or trust == "1" and name.endswith(".py"):
            shutil.copy(os.path.join(model, name), folder)
else:
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(facts, file)
