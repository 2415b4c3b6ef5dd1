"""Checks `memtrace.estimate`: a script, a function and a recipe, and requests that cannot be met."""

import functools
import json
import os
import tempfile

import memtrace

MIB = 1 << 20


def train(mib):
    import torch

    torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def refusal(*arguments, **options):
    try:
        memtrace.estimate(*arguments, **options)
    except memtrace.TraceError as error:
        return str(error)
    raise AssertionError(f"{arguments} {options} was not refused")


def main():
    own = memtrace.estimate(functools.partial(train, 300), card="mem=1g,cc=8.0")
    assert own.peak_allocated_bytes == 300 * MIB, own
    assert sum(own.owners.values()) == sum(own.modules.values()) == 300 * MIB, (own.owners, own.modules)
    assert own.peak_host_bytes > 10 * MIB
    assert own.fits() and own.fits("t4") and not own.fits("mem=256m,cc=8.0,context=0")
    assert "fits" in repr(own), own

    large = memtrace.estimate(functools.partial(train, 2000), card="mem=1g,cc=8.0")
    assert not large.fits() and large.fits("t4"), large

    with tempfile.TemporaryDirectory() as folder:
        script = os.path.join(folder, "script.py")
        with open(script, "w") as file:
            file.write("import sys, torch; torch.empty(int(sys.argv[1]), device='cuda', dtype=torch.uint8)\n")
            file.write("assert sys.argv[2] == '{} it\\'s {gpus}', sys.argv")
        answer = memtrace.estimate(script, arguments=[8 * MIB, "{} it's {gpus}"], card="t4")
        assert answer.peak_allocated_bytes == 8 * MIB, answer
        with open(script, "w") as file:
            file.write("import memtrace; memtrace.estimate(__file__, card='t4')")
        os.environ["PYTHONPATH"] = os.path.dirname(os.path.dirname(memtrace.__file__))
        assert 'put the call under if __name__ == "__main__"' in refusal(script, card="t4")

        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}
        config.update(intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(config, file)
        model = {"recipe": "lora", "model": folder, "seq": 64, "card": "t4"}
        os.environ["HF_HUB_OFFLINE"] = "1"
        small = memtrace.estimate(**model, settings={"rank": 4})
        assert small.fits() and small.owners["optimizer_state"] > 0, small
        assert "the recipe lora has rank=16" in refusal(**model, settings={"rnk": 4})
        assert "vLLM fills the card at any batch" in refusal(recipe="serve", model=folder, card="t4")

    assert "name one card and one length" in refusal(functools.partial(train, 1), card="t4,l4")
    assert "no card is called" in refusal(functools.partial(train, 1), card="rtx4061")
    assert "define it at the top of a file" in refusal(lambda: None)
    assert "the program failed" in refusal(os.path.join(folder, "script.py"), card="t4")
    assert "only a recipe takes batch, settings" in refusal("train.py", batch=2, settings={"rank": 4})
    assert "only a script takes arguments" in refusal(functools.partial(train, 1), arguments=["8"])
    assert "only a script takes arguments" in refusal(recipe="lora", model="model", arguments=["8"])
    assert "give a program, or a recipe and a model" in refusal()
    assert "give a program, or a recipe and a model" in refusal(recipe="lora")


if __name__ == "__main__":
    main()
