"""Checks a request of `memtrace fit --recipe` in the user's Python.

The arguments are FOLDER and the request as JSON; `ModelCheck` in model_check.rs has its fields. Writes the
model's config.json into FOLDER, unless the model is timm's. Prints JSON as the last line: the folder of the
model in a pipeline (`subfolder`), and the number of its layers or blocks (`layers`), null if it is not known.
If the request cannot be met, prints the reason as the last line of stderr, and exits with 2.
"""

import difflib
import importlib.util
import json
import os
import pydoc
import re
import shutil
import sys
import typing

folder, request = sys.argv[1], json.loads(sys.argv[2])
model, lengths = request["model"], request["lengths"]
trusts_code, searched, texts = request["trusts_code"], request["searched"], request["texts"]
library, packages = request["library"], request["packages"]


def refuse(why):
    print(why, file=sys.stderr)
    sys.exit(2)


def first_line(error):
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def answer(subfolder="", layers=None):
    print(json.dumps({"subfolder": subfolder, "layers": layers}))


def write(facts, place=""):
    os.makedirs(os.path.join(folder, place), exist_ok=True)
    with open(os.path.join(folder, place, "config.json"), "w") as file:
        json.dump(facts, file)


def check_texts():
    """Checks the settings whose values the installed packages decide."""
    own = {}
    if library != "vllm":
        own["DTYPE"] = ["bfloat16", "float16", "float32", "float64"]
    elif texts:
        from vllm.config.cache import CacheDType
        from vllm.config.model import ModelDType
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

        own = {"DTYPE": typing.get_args(ModelDType), "CACHE_DTYPE": typing.get_args(CacheDType)}
        own["QUANTIZATION"] = ["", *QUANTIZATION_METHODS]
    if "ATTENTION" in texts:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        names = [name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in name]
        # A name with a slash is a kernel on the hub.
        own["ATTENTION"] = ["eager", *names, *(name for name in texts["ATTENTION"] if "/" in name)]
    if "CACHE" in texts:
        from transformers.generation import configuration_utils

        names = getattr(configuration_utils, "ALL_CACHE_IMPLEMENTATIONS", ("static", "offloaded"))
        own["CACHE"] = list(dict.fromkeys(["dynamic", *names]))
    if "OPTIMIZER" in texts and "trl" in packages:
        from transformers.training_args import OptimizerNames

        own["OPTIMIZER"] = [name.value for name in OptimizerNames]
    for name in own.keys() & texts.keys():
        for value in texts[name]:
            if value not in own[name]:
                allowed = ", ".join(name or '""' for name in own[name])
                refuse(f"--set {name.lower()}={value}: expected one of {allowed}")
    if "flash_attention_2" in texts.get("ATTENTION", []) and not importlib.util.find_spec("flash_attn"):
        refuse(
            f"--set attention=flash_attention_2 needs flash_attn: {sys.executable} -m pip install flash-attn"
        )
    for value in texts.get("OPTIMIZER", []) if "trl" not in packages else []:
        import torch

        try:
            kind = pydoc.locate(value)
        except pydoc.ErrorDuringImport as error:
            refuse(f"--set optimizer={value}: {first_line(error)}")
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            refuse(f"--set optimizer={value}: expected the path of an optimizer's class: torch.optim.SGD")


def check_targets(build, is_list):
    """Checks that each target of the adapters is a part of the model, which `build` returns."""
    import torch

    for value in texts.get("TARGETS", []):
        if value == "all-linear":
            continue
        with torch.device("meta"):
            names = {name: part for name, part in build().named_modules() if name}
        for target in value.split(",") if is_list else [value]:
            try:
                pattern = re.compile(rf"(.*\.)?{re.escape(target)}" if is_list else target)
            except re.error as error:
                refuse(f"--set targets={value}: not a regular expression: {error}")
            if not any(map(pattern.fullmatch, names)):
                linear = [name for name, part in names.items() if isinstance(part, torch.nn.Linear)]
                ends = dict.fromkeys(name.rsplit(".", 1)[-1] for name in linear)
                refuse(
                    f"--set targets={value}: no part of the model is called {target!r}; its linear layers "
                    f"end in {', '.join(ends)}"
                )


def lacks_sdpa(kind):
    """Returns True if transformers has no attention of PyTorch for a model type. Its source is read as text,
    because an import needs torch."""
    try:
        source = importlib.util.find_spec(f"transformers.models.{kind}.modeling_{kind}").origin
        with open(source) as file:
            code = file.read()
    except (ImportError, AttributeError, OSError):
        return False
    return "_supports_sdpa = False" in code and "_supports_sdpa = True" not in code


def check_timm():
    import timm

    if not timm.is_model(model):
        near = difflib.get_close_matches(model, timm.list_models(), 3)
        refuse(f"--model {model}: timm has no such model; similar names: {', '.join(near) or 'none'}")
    answer()


def check_diffusers():
    """Finds the UNet or the transformer of a pipeline, or alone."""
    from diffusers.configuration_utils import ConfigMixin

    class Configuration(ConfigMixin):
        config_name = "config.json"

    why = None
    is_alone = os.path.isfile(os.path.join(model, "config.json"))
    for place in [""] if is_alone else ["unet", "transformer", ""]:
        try:
            facts = Configuration.load_config(model, subfolder=place)
            break
        except Exception as error:
            why = why or error
    else:
        refuse(f"--model {model}: no config.json was found or read: {first_line(why)}")
    name = str(facts.get("_class_name"))
    if name not in ("UNet2DConditionModel", "FluxTransformer2DModel"):
        refuse(
            f"--model {model}: the recipe trains UNet2DConditionModel and FluxTransformer2DModel, not {name}"
        )
    if name == "UNet2DConditionModel" and facts.get("addition_embed_type") != "text_time":
        refuse(f"--model {model}: the recipe trains UNets of SDXL, which this configuration is not")
    for length in lengths:
        if length % 16:
            refuse(f"--size {length}: the width and height must be multiples of 16 pixels")
    if "TARGETS" in texts:
        import diffusers

        check_targets(lambda: getattr(diffusers, name).from_config(facts), True)
    write(facts, place)
    answer(place, count_blocks(name, facts) if searched == "BLOCKS_TO_SWAP" else None)


def count_blocks(name, facts):
    import diffusers
    import torch

    with torch.device("meta"):
        model = getattr(diffusers, name).from_config(facts)
    lists = [part for name, part in model.named_modules() if name.endswith("transformer_blocks")]
    return sum(map(len, lists))


def read_facts():
    """Returns the entries of the config.json of a model of transformers."""
    import transformers
    from transformers import CONFIG_MAPPING, PretrainedConfig

    if os.path.isdir(model) and not os.path.isfile(os.path.join(model, "config.json")):
        refuse(f"--model {model}: the folder has no config.json")
    try:
        facts, _ = PretrainedConfig.get_config_dict(model)
    except Exception as error:
        refuse(f"--model {model}: no config.json was found or read: {first_line(error)}")
    kind = facts.get("model_type")
    if not facts:
        refuse(f"--model {model}: no config.json was found as a file, in the cache or on the hub")
    if "auto_map" in facts and kind not in CONFIG_MAPPING and not trusts_code:
        refuse(
            f"--model {model}: the configuration has its own code, which is run only with --trust-remote-code"
        )
    if kind not in CONFIG_MAPPING and "auto_map" not in facts:
        known = f"transformers {transformers.__version__} has no model type {kind!r}"
        refuse(f"--model {model}: {known}; a newer one may: pip install -U transformers")
    return facts


def check_transformers():
    """Checks a model of transformers or vLLM."""
    import transformers

    facts = read_facts()
    kind = facts.get("model_type")
    try:
        config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=trusts_code)
    except Exception as error:
        refuse(f"--model {model}: {first_line(error)}")
    if library == "transformers" and "ATTENTION" not in texts and lacks_sdpa(str(kind).replace("-", "_")):
        refuse(f"--model {model}: the model type {kind!r} has no sdpa attention: --set attention=eager")
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    if isinstance(most, int) and max(lengths) > most:
        refuse(f"--seq {max(lengths)}: the model's limit is {most} tokens (max_position_embeddings)")
    if "liger_kernel" in packages:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
            refuse(f"--set liger: this version of Liger has no kernels for the model type {kind!r}")
    if "TARGETS" in texts:
        auto = transformers.AutoModelForCausalLM
        check_targets(lambda: auto.from_config(config, trust_remote_code=trusts_code), False)
    write(facts)
    if os.path.isdir(model) and trusts_code:
        # A configuration with its own code needs the Python files in its folder.
        for name in os.listdir(model):
            if name.endswith(".py"):
                shutil.copy(os.path.join(model, name), folder)
    answer(layers=getattr(text, "num_hidden_layers", None))


def check_packages():
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        refuse(f"the recipe needs {' and '.join(missing)}: {sys.executable} -m pip install {names}")


def main():
    check_packages()
    needs_torch = texts or trusts_code or "liger_kernel" in packages or searched == "BLOCKS_TO_SWAP"
    if library != "timm" and not needs_torch:
        # A configuration needs no tensors. Without torch, the libraries import in a third of the time.
        sys.modules["torch"] = None
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    check_texts()
    {"timm": check_timm, "diffusers": check_diffusers}.get(library, check_transformers)()


if __name__ == "__main__":
    main()
