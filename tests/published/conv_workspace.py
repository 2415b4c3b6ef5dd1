"""The workspace that cuDNN takes for a 3x3 convolution of 64 to 64 channels, fp32, in inference.

conv_workspace.py
"""

import torch
from harness import figure

convolution = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False).cuda()
x = torch.randn(2, 64, 128, 128, device="cuda")
with torch.no_grad():
    convolution(x)
    torch.cuda.reset_peak_memory_stats()
    y = convolution(x)
known = sum(tensor.numel() * tensor.element_size() for tensor in (x, y, convolution.weight))
figure("N2 C64 128x128", workspace=torch.cuda.max_memory_allocated() - known)
