"""TorchRec: DLRM's embedding bags and interaction, trained with a fused optimizer."""

import torch
from peaks import print_peak
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

torch.manual_seed(0)
tables = [
    EmbeddingBagConfig(name=f"t{n}", embedding_dim=64, num_embeddings=10_000, feature_names=[f"f{n}"])
    for n in range(4)
]
bags = EmbeddingBagCollection(tables, device=torch.device("cuda"))
model = DLRM(bags, 13, dense_arch_layer_sizes=[128, 64], over_arch_layer_sizes=[128, 1], dense_device="cuda")
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
for _ in range(3):
    sparse = KeyedJaggedTensor.from_lengths_sync(
        keys=[f"f{n}" for n in range(4)],
        values=torch.randint(0, 10_000, (4 * 64 * 2,)),
        lengths=torch.full((4 * 64,), 2, dtype=torch.int32),
    ).to("cuda")
    model(torch.randn(64, 13, device="cuda"), sparse).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
print_peak()
