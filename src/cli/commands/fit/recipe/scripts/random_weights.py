"""Builds a model with random weights. `../catalog.rs` puts the marked lines into the scripts of the recipes,
in place of `# [+random_weights]`."""

import torch


def random_model(auto, config, device, dtype, options, trust):
    # [random_weights]
    with torch.device("meta"):
        empty = auto.from_config(config, dtype=dtype, trust_remote_code=trust)
    # Memory does not depend on the values, so with a GPU none are written.
    fill = torch.empty if device == "cuda" else lambda shape, dtype: torch.randn(shape, dtype=dtype) * 0.05
    weights = {name: fill(tensor.shape, dtype=tensor.dtype) for name, tensor in empty.named_parameters()}
    model = type(empty).from_pretrained(None, state_dict=weights, **options)
    # []
    return model
