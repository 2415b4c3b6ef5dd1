"""torchao's benchmark of optimizers: a ViT of timm learns 45 classes from pictures of 224 x 224 pixels.

timm_optim.py fused|ao8|ao-fp8          # ViT-H, bf16 autocast, compiled, a batch of 8
timm_optim.py fused|ao8|ao-fp8 giant    # ViT-g, bf16, a batch of 32, activations checkpointed
"""

import sys
from functools import partial

import timm
import torch
import torch.nn.functional as F
from harness import figure
from torchao.prototype import low_bit_optim

name, giant = sys.argv[1], "giant" in sys.argv[2:]
torch.nn.Linear.reset_parameters = lambda self: None  # the values do not matter
create = partial(timm.create_model, num_classes=45, img_size=224, weight_init="skip")
model = create("vit_giant_patch14_dinov2" if giant else "vit_huge_patch14_224")
if giant:
    model.set_grad_checkpointing()
    model.bfloat16()
model.cuda()
if not giant:
    model.compile(fullgraph=True)

make = {
    "fused": partial(torch.optim.AdamW, fused=True),
    "ao8": low_bit_optim.AdamW8bit,
    "ao-fp8": low_bit_optim.AdamWFp8,
}[name]
optimizer = make(model.parameters(), lr=1e-4, weight_decay=0)
scaler = torch.amp.GradScaler("cuda", enabled=False)
batch = 32 if giant else 8

model.train()
for _ in range(3):
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(45, (batch,))
    if giant:
        images = images.bfloat16()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=not giant):
        loss = F.cross_entropy(model(images.cuda()), labels.cuda())
    scaler.scale(loss).backward()
    loss.item()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
figure(" ".join(sys.argv[1:]), allocated=torch.cuda.max_memory_allocated())
