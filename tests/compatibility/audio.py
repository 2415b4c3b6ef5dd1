"""torchaudio's models: audio.py wav2vec2|conformer."""

import sys

import torch
import torchaudio
from peaks import print_peak


def wav2vec2():
    model = torchaudio.models.wav2vec2_model(
        extractor_mode="group_norm",
        extractor_conv_layer_config=None,
        extractor_conv_bias=False,
        encoder_embed_dim=256,
        encoder_projection_dropout=0.1,
        encoder_pos_conv_kernel=128,
        encoder_pos_conv_groups=16,
        encoder_num_layers=4,
        encoder_num_heads=8,
        encoder_attention_dropout=0.1,
        encoder_ff_interm_features=512,
        encoder_ff_interm_dropout=0.0,
        encoder_dropout=0.1,
        encoder_layer_norm_first=False,
        encoder_layer_drop=0.0,
        aux_num_out=32,
    ).cuda()
    return model, lambda: model(torch.randn(2, 16000, device="cuda"))[0]


def conformer():
    model = torchaudio.models.Conformer(80, 4, 512, 4, 31).cuda()
    lengths = torch.tensor([200, 120], device="cuda")
    return model, lambda: model(torch.randn(2, 200, 80, device="cuda"), lengths)[0]


torch.manual_seed(0)
model, forward = globals()[sys.argv[1]]()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    out = forward()
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", tuple(out.shape))
print_peak()
