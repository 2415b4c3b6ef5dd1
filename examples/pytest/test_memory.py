"""Checks limits of GPU memory in a test suite. Two of the five tests fail on purpose.

pytest --memtrace=h100-80g test_memory.py     on a simulated GPU: this machine needs none
pytest --memtrace test_memory.py              on the GPU of this machine
pytest test_memory.py                         the tests run, and no limit is checked
"""

import pytest
import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEPT = []


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


@pytest.fixture
def model():
    return MLP(256).to(DEVICE)


def batch(size):
    return torch.randn(size, 256, device=DEVICE)


@pytest.mark.limit_gpu_memory("200 MiB")
def test_training_step_fits(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch(1024)).sum().backward()
    optimizer.step()


@pytest.mark.limit_gpu_memory("16 MiB")
def test_large_batch_is_over_its_limit(model):
    model(batch(8192)).sum().backward()


@pytest.mark.limit_gpu_leaks("1 MiB")
def test_evaluation_leaves_nothing_behind(model):
    with torch.no_grad():
        model(batch(1024))


@pytest.mark.limit_gpu_leaks("1 MiB")
def test_outputs_are_kept_by_mistake(model):
    KEPT.append(model(batch(4096)))


def test_shape(model):
    assert model(batch(3)).shape == (3, 256)
