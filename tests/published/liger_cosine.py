"""Liger-Kernel: distillation of a head of 4096 into one of 2048 by cosine similarity, vocabulary 128256."""

import torch
import torch.nn.functional as F
from harness.liger import loss, sweep

VOCABULARY, HIDDEN = 128256, 4096


def cosine(student, teacher):
    student_norm = F.normalize(student, p=2, dim=-1)
    teacher_norm = F.normalize(teacher, p=2, dim=-1)
    similarity = F.cosine_similarity(student_norm, teacher_norm, dim=-1)
    return (1.0 * (1 - similarity)).mean()


def heads():
    kind = {"bias": False, "dtype": torch.bfloat16, "device": "cuda"}
    student = torch.nn.Linear(HIDDEN // 2, VOCABULARY, **kind)
    teacher = torch.nn.Linear(HIDDEN, VOCABULARY, **kind)
    return student, teacher


def case(BT, _):
    student, teacher = heads()
    liger = heads()  # noqa: F841 - Liger's layers stay allocated, too
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    made = torch.rand(BT, HIDDEN // 2, **kind)
    copies = [made.detach().clone().requires_grad_() for _ in range(2)]
    x = copies[1]
    y = torch.rand(BT, HIDDEN, **kind)
    target = torch.randint(0, VOCABULARY, (BT,), device="cuda")

    def logits():
        student_out = x @ student.weight.t()
        with torch.no_grad():
            teacher_out = y @ teacher.weight.t()
        student_logits = student_out.view(BT, -1).float()
        teacher_logits = teacher_out.view(BT, -1).float()
        hard = torch.nn.CrossEntropyLoss()(student_logits, target)
        return student_logits, teacher_logits, hard

    def forward():
        student_logits, teacher_logits, hard = logits()
        student_logits /= 1.0
        teacher_logits /= 1.0
        soft = cosine(student_logits, teacher_logits)
        return 0.5 * hard + 0.5 * soft

    loss(f"BT={BT}", forward)


sweep("BT", case)
