"""Liger-Kernel: the KTO loss by a linear layer with bias onto a vocabulary of 128256, and a reference, bf16.

The labels are on the host, half of them preferred: on the device their number would be unknown.
"""

import torch
from harness.liger import loss, sweep

VOCABULARY, HIDDEN, LENGTH = 128256, 1024, 512


def log_probabilities(logits, labels):
    mask = labels != 42
    labels = torch.where(labels == 42, 0, labels)
    each = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (each * mask).sum(-1) / mask.sum(-1)


def case(B, _):
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    head, reference, *liger = (torch.nn.Linear(HIDDEN, VOCABULARY, **kind) for _ in range(4))
    x = torch.randn(B, LENGTH, HIDDEN, **kind)
    target = torch.randint(VOCABULARY, (B, LENGTH), device="cuda")
    preferred = torch.arange(B) < B // 2
    kl = torch.randn(1, **kind)
    x_reference = torch.randn(B, LENGTH, HIDDEN, **kind)

    def policy():
        outputs = x @ head.weight.t()
        outputs = outputs + head.bias
        logits = outputs.float()
        logs = log_probabilities(logits, target)
        return logs[preferred], logs[~preferred], logits[preferred], logits[~preferred]

    def frozen():
        with torch.no_grad():
            logits = x_reference @ reference.weight.t()
            logits = logits + reference.bias
            logs = log_probabilities(logits, target)
            return logs[preferred], logs[~preferred]

    def forward():
        chosen, rejected, chosen_logits, rejected_logits = policy()
        chosen_reference, rejected_reference = frozen()
        chosen_ratio = chosen - chosen_reference
        chosen_losses = 1 - torch.sigmoid(0.1 * (chosen_ratio - kl))
        rejected_ratio = rejected - rejected_reference
        rejected_losses = 1 - torch.sigmoid(0.1 * (kl - rejected_ratio))
        losses = torch.cat((chosen_losses, rejected_losses), 0)
        result = 0.0 * torch.tensor(0.0, device="cuda") + losses.mean()
        chosen_logits.detach().sum(), rejected_logits.detach().sum()
        return result

    loss(f"B={B}", forward)


sweep("B", case)
